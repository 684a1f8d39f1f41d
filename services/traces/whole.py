"""Collection of all data of one rollout from the run's store and config.

Missing data is replaced by a note and is not an error: the data file of a task may be gone, or a
different version may have written a row.

Preferred SDPO hints of a rollout's turns, by the same rules as training batches.

No model is loaded: a text is tokenized only if its size in bytes exceeds the token limit. Whether a
hint fitted into the context of its step is not determined.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import HintsConfig
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.rollouts.hint_sources import Hint, HintCounts, HintSources, Place, WrittenHint
from composer_mesh.rollouts.hints import TEMPLATES
from composer_mesh.rollouts.pairs import pair_from_json
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.claim import own_content
from composer_mesh.services.steps.hint_writing import worded_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import damaged, object_row, stored_pair
from composer_mesh.services.traces.listing import Listed, ListedRollout, Paired

TOKENIZER_FILE = "tokenizer.json"


class TokenCount:
    """Counts the tokens of a text. `find` returns a tokenizer's folder, when one is needed."""

    def __init__(self, limit: int, find: Callable[[], Path | None]) -> None:
        self._limit, self._find = limit, find
        self._tokenizer: Tokenizer | None = None
        self.guessed = False
        """Whether a text was counted without a tokenizer."""

    def __call__(self, text: str) -> int:
        """Return the number of tokens, or an upper bound if that is within the limit.

        Each token has at least one byte. Without a tokenizer every text is assumed to be short
        enough.
        """
        if (most := len(text.encode(errors="replace"))) <= self._limit:
            return most
        if self._tokenizer is None:
            folder = self._find()
            if folder is None:
                self.guessed = True
                return self._limit
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def hints_of(
    trace: Trace,
    group: Sequence[Trace],
    config: HintsConfig,
    answer: str | None,
    written: Mapping[Place, WrittenHint],
    tokens: Callable[[str], int],
) -> tuple[list[Hint], list[str]]:
    """Return the first hint of each turn that gets one, and notes about turns without one.

    `written` holds a hint writer's texts by trace and turn.
    """
    templates = TEMPLATES.extended(config.templates) if config.templates else TEMPLATES
    sources = HintSources(config, lambda _: answer, tokens, templates, written)
    found, notes = list[Hint](), list[str]()
    for turn in sources.turns(trace, group):
        counts = HintCounts()
        hint = next(sources.hints(trace, turn, group, counts), None)
        if hint is not None:
            found.append(hint)
        elif counts.faults:
            notes.append(f"turn {turn} has no hint: {next(iter(counts.faults))}")
        elif counts.refused:
            notes.append(f"turn {turn} has no hint: each one would have stated the answer")
    return found, notes


def tokenizer_folder(run: Path, policy: Path | None) -> Path | None:
    """Return the policy's tokenizer folder: its newest checkpoint, or the policy's folder."""
    steps = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    numbered = [(int(number), path) for path, number in steps.items() if number.isdecimal()]
    folders = [path for _, path in sorted(numbered, reverse=True)]
    if policy is not None:
        folders.append(policy)
    return next((one for one in folders if (one / TOKENIZER_FILE).is_file()), None)


CONFIG_FILE = "config.toml"
DROPPED = "dropped by a filter"


def whole_rollout(
    reader: RunReader, run: Path, one: Listed, config: Config | None
) -> ListedRollout:
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
            config.sdpo.hints.max_tokens, partial(own_tokenizer, run, config.policy.folder)
        )
        written = _written(reader, one.row.group_id)
        hints, without = hints_of(trace, group, config.sdpo.hints, answer, written, tokens)
        notes += without
        if tokens.guessed:
            notes.append(
                "no tokenizer of a run of this account was found, so a hint may be shown longer "
                "than it was used"
            )
    queries = _teacher_queries(reader, one.row.group_id)
    return ListedRollout(
        one,
        trace,
        group,
        answer,
        hints,
        [*_pairs(reader, trace), *_dropped(queries, trace)],
        [late for late in reader.rewards(None) if late.trace_id == trace.trace_id],
        figures if isinstance(figures := queries.get("figures"), dict) else {},
        notes,
    )


def own_tokenizer(run: Path, policy: Path | None) -> Path | None:
    """Return the folder of a tokenizer; None for a stranger's run, whose patterns may never end."""
    return tokenizer_folder(run, policy) if own_content(run / CONFIG_FILE) else None


def _written(reader: RunReader, group_id: int) -> dict[Place, WrittenHint]:
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


def _teacher_queries(reader: RunReader, group_id: int) -> dict[str, Any]:
    """Return the stored outcome of a group's teacher queries, empty if there were none."""
    body = reader.teacher_query_of(group_id) or b"{}"
    return object_row("asked", (group_id, body))


def _dropped(queries: dict[str, Any], trace: Trace) -> list[Paired]:
    """Return the pairs of a rollout that a filter dropped; only the query outcome has them."""
    candidates = queries.get("candidates")
    found = candidates if isinstance(candidates, list) else []
    try:
        pairs = [pair_from_json(json.dumps(one)) for one in found if isinstance(one, dict)]
    except ValueError as error:
        raise damaged("asked", trace.group_id, short_reason(error)) from None
    return [Paired(pair, DROPPED, None) for pair in pairs if pair.trace_id == trace.trace_id]
