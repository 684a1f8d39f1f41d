"""Rollouts and pairs for a store, and a run directory that has some."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.store.writing import RunStore


def trace_of(group: int, sample: int = 0, version: int = 0, reward: float = 0.5) -> Trace:
    """Two turns; the second one is by the next version, and the first one has failed."""
    rng = random.Random(f"{group} {sample}")
    turns = [_turn(rng, [version] * 4, "stop"), _turn(rng, [version, version + 1], "length")]
    messages: list[Message] = [{"role": "user", "content": "line\nend \u2028 ü"}]
    sites = [ErrorSite(0, "unknown_tool", "unknown_tool", {"tool": "ü"})]
    name = f"train-{group:06d}-{sample:03d}"
    return Trace(
        name, group, sample, "toolbox", "train", group, turns, messages, reward, True, sites
    )


def _turn(rng: random.Random, versions: list[int], stop: Any) -> Turn:
    context, action = ([rng.randrange(150_000) for _ in range(n)] for n in (3, len(versions)))
    return Turn(context, action, [-rng.random() for _ in versions], versions, stop)


def group_of(group: int, size: int = 2, version: int = 0) -> list[Trace]:
    return [trace_of(group, sample, version, sample % 2) for sample in range(size)]


def pair_of(group: int, name: str = "a", version: int = 0) -> PreferencePair:
    said, trace = assistant_message("Answer: 4", "call"), trace_of(group).trace_id
    fixed = (0, [], [1], "Answer: 4", said, "", said, [2], version, ["a", "b"], 2, 2, 0.1, True)
    return PreferencePair(f"{trace}/{name}", f"{trace}/0", trace, *fixed)


async def short_run(root: Path, config: Config, steps: int = 2) -> None:
    """A run of so many steps of one group each, a finished group that waits, and one under way."""
    with RunStore(root, config) as store:
        store.add_event("run_started")
        store.add_evaluation(Evaluation(0, 0.25, 8))
        for step in range(steps + 1):
            store.enter(step, step)
            await store.add_group(step, group_of(step, version=step))
            await store.add_worded(step, b'{"hints": 1}')
            await store.add_teacher_queries(step, b"{}", [pair_of(step, version=step)])
        store.enter(steps + 1, steps)
        for step in range(steps):
            pairs, _ = await store.take_pairs(step, 10, 1)
            await store.plan_step(step, [step], b'{"n": 1}', [pair.pair_id for pair in pairs])
            await store.end_step(step, {"step": step + 1, "loss/total": 1 / 3})
