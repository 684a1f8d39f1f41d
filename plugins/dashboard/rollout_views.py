"""What the pages about rollouts show: a list, one rollout turn by turn, a group side by side.

The sampled tokens of a turn are shown as text, each with a colour by one of its figures:

    logprob     how unlikely the token was when it was sampled
    version     by which policy version, compared with the newest of the rollout
    advantage   of its rollout, or of its turn where turns have their own
    divergence  between the policy and the SDPO teacher, which saw a hint, in distilled turns
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from composer_mesh.configs.base import CustomFunction
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.requests import (
    COLOURINGS,
    PAGE_SIZE,
    SORTS,
    Colouring,
    RolloutFilter,
)
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.group_files import read_group
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, TraceRow
from composer_mesh.services.traces.command import config_of, find
from composer_mesh.services.traces.list_page import question, trained, versions
from composer_mesh.services.traces.listing import (
    TOKENIZER_FILE,
    Acted,
    Listed,
    ListedRollout,
    acted,
    own_tokenizer,
    whole_rollout,
)
from composer_mesh.services.traces.rollout_page import UNLIKELY, outcome_text

Advantages = dict[str, float | Sequence[float]]
Divergences = dict[int, Sequence[float]]
"""Those of a rollout's tokens, by turn."""


PROMPTS_S = 0.3
PROMPTS_KEPT = 5000


def rollout_list(root: Path, wanted: RolloutFilter) -> dict[str, Any]:
    """Return a page of the rollouts that fit, and the totals of all that do."""
    sort, descending = SORTS[wanted.sort]
    where = wanted.where()
    with RunReader(root) as reader:
        first = wanted.page * PAGE_SIZE
        rows = list(reader.rows(where, sort, descending, PAGE_SIZE, first))
        totals = reader.totals(where)
        kinds = reader.totals().errors if wanted.error else totals.errors
        listed = [_listed(reader, row) for row in rows]
        prompts = _prompts(reader, root, [row.group_id for row in rows])
    return {
        "rows": [
            {"one": one, "prompt": prompts.get(one.row.group_id, ""), **_row(one)} for one in listed
        ],
        "totals": totals,
        "kinds": [kind for kind in kinds if kind.isprintable()],
        "wanted": wanted,
        "first": first,
        "more": first + len(rows) < totals.count,
        "sorts": list(SORTS),
    }


def _listed(reader: RunReader, row: TraceRow) -> Listed:
    group = reader.group(row.group_id)
    return Listed(row, group.trained if group else None)


def _prompts(reader: RunReader, root: Path, groups: Sequence[int]) -> dict[int, str]:
    """Return the prompt of each group, as many as can be read in `PROMPTS_S`.

    A file that was read once is not read again, so the page has the rest when it is next shown.
    """
    until, found = time.monotonic() + PROMPTS_S, dict[int, str]()
    for group_id in dict.fromkeys(groups):
        row = reader.group(group_id) if time.monotonic() < until else None
        if row is not None and row.traces:
            found[group_id] = _prompt(root, group_id, row.bytes, row.crc)
    return found


@lru_cache(maxsize=PROMPTS_KEPT)
def _prompt(root: Path, group_id: int, size: int, crc: int) -> str:
    try:
        return question(read_group(root, group_id, size, crc)[0])
    except DamagedRecord:  # the page of the rollout says what is wrong with its file
        return ""


def _row(one: Listed) -> dict[str, Any]:
    row = one.row
    counts = {kind: row.error_kinds.count(kind) for kind in dict.fromkeys(row.error_kinds)}
    return {
        "row": row,
        "trained": trained(one),
        "versions": versions(row.oldest_version, row.newest_version),
        "errors": list(counts.items()),
    }


def rollout(root: Path, name: str, colouring: Colouring, full: bool) -> dict[str, Any]:
    """Return one rollout turn by turn.

    Raises RunUnavailable where there is none of this name, StoreMissing, or DamagedRecord.
    """
    config = config_of(root)
    with RunReader(root) as reader:
        row = find(reader, name)
        found = whole_rollout(reader, root, _listed(reader, row), config)
    notes = list(found.notes)
    advantages: Advantages = {}
    if colouring == "advantage":
        advantages, why = _advantages(config, found.group)
        notes += [why] if why else []
    divergences: Divergences = {}
    if colouring == "divergence":
        divergences, why = _divergences(root, found)
        notes += [why] if why else []
    conversation = acted(found.trace)
    folder = own_tokenizer(root, config.policy.folder if config is not None else None)
    tokenizer = tokenizer_of(folder)
    newest = max(found.trace.versions(), default=0)

    def tokens(turn: Acted) -> list[Token]:
        advantage = advantage_of(found.trace, turn.number, advantages)
        own = divergences.get(turn.number, ())
        return tokens_of(turn.turn, colouring, tokenizer, newest, advantage, own)

    return {
        "rollout": found,
        "trace": found.trace,
        **_row(found.listed),
        "siblings": found.group,
        "opening": conversation.opening,
        "turns": [
            {**_turn(found, turn), "tokens": tokens(turn) if colouring != "none" else []}
            for turn in conversation.turns
        ],
        "notes": notes,
        "full": full,
        "colouring": colouring,
        "colourings": COLOURINGS,
    }


def group(root: Path, group_id: int) -> dict[str, Any]:
    """Return the rollouts of a group side by side; raises RunUnavailable without any."""
    with RunReader(root) as reader:
        traces = reader.traces(group_id)
        stored = reader.group(group_id)
    if not traces or stored is None:
        raise RunUnavailable("the run has stored no rollouts of this group")
    return {
        "group_id": group_id,
        "group": stored,
        "question": question(traces[0]),
        "answer": traces[0].answer,
        "columns": [
            {
                "trace": trace,
                "turns": acted(trace).turns,
                "failed": {site.turn: site.error_kind for site in trace.error_sites},
            }
            for trace in traces
        ],
    }


def _turn(rollout: ListedRollout, turn: Acted) -> dict[str, Any]:
    said = turn.turn
    mean = sum(said.logprobs) / len(said.logprobs) if said.logprobs else None
    pairs = [one for one in rollout.pairs if one.pair.turn == turn.number]
    return {
        "number": turn.number,
        "message": turn.message,
        "answers": turn.answers,
        "context": len(said.context_ids),
        "sampled": len(said.action_ids),
        "versions": versions(min(said.versions, default=None), max(said.versions, default=None)),
        "logprob": mean,
        "unlikely": mean is not None and mean < UNLIKELY,
        "cut": said.stop_reason == "length",
        "sites": [site for site in rollout.trace.error_sites if site.turn == turn.number],
        "hints": [hint for hint in rollout.hints if hint.turn == turn.number],
        "pairs": [{"pair": one.pair, "became": outcome_text(one)} for one in pairs],
    }


def _advantages(config: Config | None, group: Sequence[Trace]) -> tuple[Advantages, str]:
    """Return the advantages of a group's rollouts as configured, or why they are unknown."""
    if config is None:
        return {}, "config.toml cannot be read, so the advantages are unknown"
    if isinstance(config.advantage, CustomFunction):
        return {}, "advantages of a function of yours are not computed here"
    # Imported late, since it takes seconds and 200 MB.
    from composer_mesh.services.steps.advantages import make_advantages, trajectory_advantages

    found: Mapping[str, Any] = trajectory_advantages(make_advantages(config.advantage), [group])
    return dict(found), ""


def _divergences(root: Path, rollout: ListedRollout) -> tuple[Divergences, str]:
    """Return the divergences of a rollout's distilled turns, or why there are none."""
    step, trace_id = rollout.listed.step, rollout.trace.trace_id
    if step is None:
        return {}, "no step has trained this rollout, so none of its turns was distilled"
    try:
        with RunReader(root) as reader:
            found = reader.divergences(step - 1)
    except DamagedRecord as error:
        return {}, str(error)
    own: Divergences = {one.turn: one.values for one in found if one.trace_id == trace_id}
    return own, "" if own else f"step {step} distilled no turn of this rollout"


BINS = 8
UNLIKELIEST = 6.0
"""Nats at which the colour of an unlikely token is strongest."""
LARGEST_ADVANTAGE = 2.0
LARGEST_DIVERGENCE = math.log(2)
"""Nats at which the colour is strongest: the most that a JSD with equal weights can be."""
MOST_TOKENS = 4000
TOKENIZERS_KEPT = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A token to show: its text, the class of its colour, and its figures in words."""

    text: str
    colour: str
    description: str


def tokenizer_of(folder: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a folder, kept while its file is as it was; None without one."""
    if folder is None:
        return None
    file = folder / TOKENIZER_FILE
    return _tokenizer(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=TOKENIZERS_KEPT)
def _tokenizer(file: Path, _changed_ns: int) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def tokens_of(
    turn: Turn,
    colouring: Colouring,
    tokenizer: Tokenizer | None,
    newest: int,
    advantage: float | None,
    divergences: Sequence[float] = (),
) -> list[Token]:
    """Return the first MOST_TOKENS sampled tokens of a turn; without a tokenizer their ids."""
    found = []
    figures = zip(turn.action_ids, turn.logprobs, turn.versions, strict=True)
    for place, (token, logprob, version) in enumerate(list(figures)[:MOST_TOKENS]):
        description = f"log-prob {logprob:.3f} · version {version} · id {token}"
        if advantage is not None:
            description += f" · advantage {advantage:+.3f}"
        divergence = divergences[place] if place < len(divergences) else None
        if divergence is not None:
            description += f" · divergence {divergence:.3f}"
        colour = _colour(colouring, logprob, newest - version, advantage, divergence)
        found.append(Token(_text(token, tokenizer), colour, description))
    return found


def advantage_of(
    trace: Trace, turn: int, advantages: dict[str, float | Sequence[float]]
) -> float | None:
    """Return the advantage of a turn of a rollout; None where it is unknown."""
    found = advantages.get(trace.trace_id)
    if found is None or isinstance(found, int | float):
        return found
    return float(found[turn]) if turn < len(found) else None


def _colour(
    colouring: Colouring,
    logprob: float,
    age: int,
    advantage: float | None,
    divergence: float | None,
) -> str:
    if colouring == "logprob":
        return f"u{_bin(-logprob / UNLIKELIEST)}"
    if colouring == "version":
        return f"v{min(age, BINS)}"
    if colouring == "advantage" and advantage is not None:
        side = "p" if advantage > 0 else "n"
        return f"{side}{_bin(abs(advantage) / LARGEST_ADVANTAGE)}"
    if colouring == "divergence" and divergence is not None and math.isfinite(divergence):
        side = "p" if divergence < 0 else "u"
        return f"{side}{_bin(abs(divergence) / LARGEST_DIVERGENCE)}"
    return "u0"


def _bin(share: float) -> int:
    return min(BINS, max(0, round(share * BINS)))


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"·{token}"
    text = tokenizer.decode([token], skip_special_tokens=False) or f"·{token}"
    return "↵\n".join(plain_text(line) for line in text.split("\n"))
