"""Collection of all data of one rollout from the run's store and config.

Missing data is replaced by a note and is not an error: the data file of a task may be gone, or a
different version may have written a row.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.rollouts.hint_sources import Hint, Place, Written
from composer_mesh.rollouts.pairs import pair_from_json
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.signatures import is_own
from composer_mesh.services.steps.hint_writing import worded_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import damaged, object_row, stored_pair
from composer_mesh.services.traces.hints import TokenCount, hints_of, tokenizer_folder
from composer_mesh.services.traces.listing import Listed
from composer_mesh.services.traces.rollout import Paired, Rollout

CONFIG_FILE = "config.toml"
DROPPED = "dropped by a filter"


def whole_rollout(reader: RunReader, run: Path, one: Listed, config: Config | None) -> Rollout:
    """Return the rollout of a row; raise DamagedRecord if its group cannot be read."""
    group = reader.traces(one.row.group_id)
    trace = next((trace for trace in group if trace.trace_id == one.row.trace_id), None)
    if trace is None:
        raise damaged("traces", one.row.trace_id, "the file of its group has no such rollout")
    notes: list[str] = []
    answer = trace.answer
    hints: Sequence[Hint] = ()
    if config is None:
        notes.append("config.toml cannot be read, so the hints are left out")
    elif config.sdpo.on:
        tokens = TokenCount(
            config.sdpo.hints.max_tokens, partial(own_tokenizer, run, config.policy.path)
        )
        written = _written(reader, one.row.group_id)
        hints, without = hints_of(trace, group, config.sdpo.hints, answer, written, tokens)
        notes += without
        if tokens.guessed:
            notes.append(
                "no tokenizer of a run of this account was found, so a hint may be shown longer "
                "than it was used"
            )
    asked = _asked(reader, one.row.group_id)
    return Rollout(
        one,
        trace,
        group,
        answer,
        hints,
        [*_pairs(reader, trace), *_dropped(asked, trace)],
        [late for late in reader.rewards(None) if late.trace_id == trace.trace_id],
        figures if isinstance(figures := asked.get("figures"), dict) else {},
        notes,
    )


def own_tokenizer(run: Path, policy: Path | None) -> Path | None:
    """Return the folder of a tokenizer; None for a stranger's run, whose patterns may never end."""
    return tokenizer_folder(run, policy) if is_own(run / CONFIG_FILE) else None


def _written(reader: RunReader, group_id: int) -> dict[Place, Written]:
    """Return the hint writer's texts for a group."""
    body = reader.hint_writer_output(group_id)
    try:
        return {} if body is None else worded_from_json(body).written
    except ValueError as error:
        raise damaged("groups", group_id, short_reason(error)) from None


def _pairs(reader: RunReader, trace: Trace) -> list[Paired]:
    return [
        Paired(pair, str(row.state), None if row.step is None else row.step + 1)
        for row in reader.pairs_of(trace.group_id)
        if (pair := stored_pair(row)).trace_id == trace.trace_id
    ]


def _asked(reader: RunReader, group_id: int) -> dict[str, Any]:
    """Return the stored outcome of a group's teacher queries, empty if there were none."""
    body = reader.teacher_query_of(group_id) or b"{}"
    return object_row("asked", (group_id, body))


def _dropped(asked: dict[str, Any], trace: Trace) -> list[Paired]:
    """Return the pairs of a rollout that a filter dropped; only the query outcome has them."""
    candidates = asked.get("candidates")
    found = candidates if isinstance(candidates, list) else []
    try:
        pairs = [pair_from_json(json.dumps(one)) for one in found if isinstance(one, dict)]
    except ValueError as error:
        raise damaged("asked", trace.group_id, short_reason(error)) from None
    return [Paired(pair, DROPPED, None) for pair in pairs if pair.trace_id == trace.trace_id]
