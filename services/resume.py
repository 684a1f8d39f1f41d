"""A run directory whose controller is gone, made ready to go on from its newest checkpoint.

    checkpoint of step c      what later steps left
    metrics, evaluations      of steps after c        -> metrics.jsonl.superseded-1 ...
    traces, pairs             of groups from cP on    -> traces/traces.jsonl.superseded-1 ...
    late pairs and rewards    taken by those steps    -> wait again

Nothing is deleted. Whether a directory is free is `run_directory`'s business, and nothing here
starts anything or loads torch.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoint_folder import Checkpoint, newest
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import Trace, trace_from_json
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    Evaluation,
    read_evaluations,
)
from composer_mesh.services.run_directory import RunDirectoryError, holds_a_run

TRACES_FILE = "traces/traces.jsonl"
PAIRS_FILE = "pairs/pairs.jsonl"
MOST_KEYS = 8
"""Different keys of a config that are named."""

MAY_CHANGE = ("agreement.",)
"""Sections that train nothing: a run that an alarm has ended may go on with other bounds."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """What a run already has: its checkpoint, what was measured, and the groups of late rewards.

    A run that begins has nothing of it.
    """

    checkpoint: Checkpoint | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    groups: dict[int, list[list[Trace]]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def refuse_unfit(output: Path, config: Config) -> None:
    """Raise when the run in a directory is not there, is another one, or has come to its end."""
    if not holds_a_run(output) or not (output / "config.toml").exists():
        raise RunDirectoryError(
            f"--resume {output} holds no run but must be the directory of one: name it with "
            "--output, or leave --resume out to start a new run"
        )
    try:
        before = load_config(output / "config.toml")
    except ConfigError as error:
        raise RunDirectoryError(f"--resume {output} cannot be read: {error}") from None
    changed = different_keys(before.model_dump(), config.model_dump())
    if keys := [key for key in changed if not key.startswith(MAY_CHANGE)]:
        named = ", ".join(keys[:MOST_KEYS]) + (", ..." if len(keys) > MOST_KEYS else "")
        raise RunDirectoryError(
            f"--resume {output} was run with other values of {named} but its config must be the "
            f"same: give {output / 'config.toml'} as the config, or start a new run"
        )
    if any(one.step >= config.run.steps for one in read_evaluations(output / EVALUATIONS_FILE)):
        raise RunDirectoryError(
            f"--resume {output} has trained all its {config.run.steps} steps: leave --resume out "
            "to start a new run"
        )


def different_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """The dotted keys in which two configs differ, in their order."""
    if isinstance(one, dict) and isinstance(other, dict):
        below = dict.fromkeys([*one, *other])
        return [
            key
            for name in below
            for key in different_keys(one.get(name), other.get(name), f"{path}.{name}".strip("."))
        ]
    return [] if one == other else [path]


def rewind(output: Path, config: Config) -> Begun:
    """Take a claimed run directory back to its newest checkpoint; returns what is left of it."""
    checkpoint = newest(output.absolute())
    begun = Begun(checkpoint)
    step, first = begun.step, begun.step * config.schedule.prompts_per_step
    number = _next_number(output)
    for name in (METRICS_FILE, EVALUATIONS_FILE):
        _cut(output / name, number, lambda line: line["step"] <= step)
    kept = _cut(output / TRACES_FILE, number, lambda line: line["group_id"] < first)
    traces = {line["trace_id"] for line in kept[0]}
    _, dropped = _cut(output / PAIRS_FILE, number, lambda line: line["trace_id"] in traces)
    with closing(LateStore(output / LATE_FILE)) as late:
        late.rewind(step)
        late.forget_pairs(line["pair_id"] for line in dropped)
    begun.evaluations.extend(read_evaluations(output / EVALUATIONS_FILE))
    if config.late_rewards.on:
        begun.groups.update(_trained_groups(kept[0], config, step))
    return begun


def _next_number(output: Path) -> int:
    """One more than what earlier resumes of this run have used."""
    used = [int(path.suffix.rpartition("-")[2]) for path in output.glob("**/*.superseded-*")]
    return max(used, default=0) + 1


def _cut(path: Path, number: int, keep: Callable[[Line], bool]) -> tuple[list[Line], list[Line]]:
    """Move the lines that are not kept to a file beside; returns both sorts, read.

    A last line that was cut off mid-write is moved too.
    """
    if not path.exists():
        return [], []
    *lines, rest = path.read_bytes().split(b"\n")
    read = [(line, json.loads(line)) for line in lines if line.strip()]
    kept = [(line, value) for line, value in read if keep(value)]
    dropped = [(line, value) for line, value in read if not keep(value)]
    moved = [line for line, _ in dropped] + ([rest] if rest else [])
    if moved:
        _write(path.with_name(f"{path.name}.superseded-{number}"), moved)
        _write(path, [line for line, _ in kept])
    return [value for _, value in kept], [value for _, value in dropped]


def _write(path: Path, lines: Sequence[bytes]) -> None:
    """Replace a file as a whole; it is on disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _trained_groups(
    lines: Sequence[Line], config: Config, step: int
) -> dict[int, list[list[Trace]]]:
    """The groups of the steps that late rewards may still correct, by step."""
    size = config.schedule.prompts_per_step
    oldest = max(0, step - config.late_rewards.max_age)
    groups: dict[int, list[Trace]] = {}
    for line in lines:
        if line["group_id"] >= oldest * size:
            groups.setdefault(line["group_id"], []).append(trace_from_json(json.dumps(line)))
    return {
        past: [groups[group] for group in range(past * size, (past + 1) * size) if group in groups]
        for past in range(oldest, step)
    }
