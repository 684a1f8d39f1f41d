"""Simulated rollouts, training and syncs of configured durations, for the real controller.

The generators are one engine that decodes all of its requests concurrently, each the slower the
more there are. It loads new weights between two tokens, or only when no request is left (drain).
"""

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from simulated_time import SimulatedLoop

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Split, Trace, Turn
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.tasks.loading import heldout_indices


@dataclass(frozen=True)
class Durations:
    """Durations in seconds. A rollout's is log-normal, by seed and number, over its turns."""

    median: float = 30.0
    sigma: float = 1.0
    turns: int = 4
    busy: float = 64.0
    """Number of concurrent requests at which each takes twice as long as one alone."""
    train: float = 60.0
    copy: float = 1.0
    move: float = 4.0
    swap: float = 0.5
    recompute: float = 2.0
    """Recomputing the caches of requests that continue with new weights."""
    slow_share: float = 0.0
    """Share of the groups whose rollouts take `slow_times` as long."""
    slow_times: float = 30.0

    def __str__(self) -> str:
        return (
            f"rollouts log-normal, median {self.median:g} s alone, sigma {self.sigma:g}, "
            f"{self.turns} turns; {self.busy:g} at once take twice as long; train {self.train:g} s;"
            f" sync {self.copy:g} + {self.move:g} + {self.swap:g} s, caches {self.recompute:g} s"
        )


class Engine:
    """Requests that share one machine; `work` is a request's duration alone, in seconds."""

    def __init__(self, busy: float) -> None:
        self._busy, self._number = busy, count()
        self._requests: list[tuple[float, int, asyncio.Future[None]]] = []
        self._progress = self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self.version = 0

    async def run(self, work: float) -> list[int]:
        """Run one request; return the versions of its first and its last token."""
        await self._open.wait()
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._requests, (self._progress + work, next(self._number), done))
        self._plan()
        first = self.version
        await done
        return [first, self.version]

    async def pause(self, seconds: float, version: int) -> None:
        """Load new weights while every request waits for its next token."""
        self._advance()
        self._paused = True
        self._plan()
        await asyncio.sleep(seconds)
        self._advance()
        self._paused, self.version = False, version
        self._plan()

    async def drain(self) -> None:
        """Refuse requests until `reopen`, and wait for the last one."""
        self._open.clear()
        while self._requests:
            self._idle.clear()
            await self._idle.wait()

    def reopen(self) -> None:
        self._open.set()

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._requests)

    @property
    def _rate(self) -> float:
        return 0.0 if self._paused else 1 / (1 + len(self._requests) / self._busy)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._progress += self._rate * (now - self._since)
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._requests and not self._paused:
            left = max(0.0, self._requests[0][0] - self._progress)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._requests and self._requests[0][0] <= self._progress + 1e-9:
            heapq.heappop(self._requests)[2].set_result(None)
        if not self._requests:
            self._idle.set()
        self._plan()


@dataclass
class World:
    """Every port of a run without channels 2 and 3."""

    durations: Durations
    seed: int
    drains: bool = False
    oldest: Callable[[int], int | None] = lambda _: None
    """Returns the version of the oldest tokens that a step trains."""
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)
    """The groups of each step."""
    retries: Any = None
    trained: int = 0

    def __post_init__(self) -> None:
        self.engine = Engine(self.durations.busy)
        self.retries = self
        self._free = asyncio.Event()
        self._free.set()

    # --- the task, its rollouts and their batches

    def pick(self, split: Split, index: int) -> Episode:
        return self.episode(split, index)

    def episode(self, split: Split, index: int) -> Episode:
        return Episode("async", split, index, {"number": index})

    def start(self, episode: Any, group: int, size: int, _: Any) -> list[asyncio.Task[Trace]]:
        rollouts = (self._rollout(episode.split, group, number) for number in range(size))
        return [asyncio.create_task(rollout) for rollout in rollouts]

    async def comparable(self, _: Any, traces: list[Trace]) -> list[Trace]:
        return traces

    async def _rollout(self, split: Any, group: int, number: int) -> Trace:
        rng = random.Random(f"{self.seed} {group} {number}")
        took = self.durations.median * math.exp(self.durations.sigma * rng.gauss(0, 1))
        if random.Random(f"{self.seed} {group}").random() < self.durations.slow_share:
            took *= self.durations.slow_times
        turns = []
        for _ in range(self.durations.turns if split == "train" else 0):
            versions = await self.engine.run(took / self.durations.turns)
            turns.append(Turn([], [0, 0], [0.0, 0.0], versions, "stop"))
        name = f"{group}-{number}"
        return Trace(name, group, number, "", split, group, turns, [], 0.0, False, [])

    def batch(self, step: int, groups: Sequence[Sequence[Trace]], *_: Any) -> StepBatch:
        self.taken.append([group[0].group_id for group in groups])
        return StepBatch(step, [], [], [], oldest=self.oldest(step))

    def figures(self) -> dict[str, int]:
        return {}

    def cached_prompts(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...

    def check_step(self, *_: Any) -> None: ...

    def check_evaluation(self, *_: Any) -> None: ...

    # --- trainer and weights

    async def train(self, _: StepBatch) -> dict[str, Any]:
        await asyncio.sleep(self.durations.train)
        await self._free.wait()
        self.trained += 1
        return {}

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        version, times = self.trained, self.durations
        self._free.clear()
        if on_snapshot is not None:
            on_snapshot()
        await asyncio.sleep(times.copy)
        self._free.set()
        await asyncio.sleep(times.move)
        if self.drains:
            await self.engine.drain()
        await self.engine.pause(times.swap + times.recompute * self.engine.busy, version)
        self.engine.reopen()
        return version

    async def save(self, _: int) -> None: ...

    async def saved(self) -> None: ...

    # --- store and watcher

    def enter(self, _group: int, _version: int) -> None: ...

    async def add_group(self, _: int, traces: Sequence[Trace]) -> list[Trace]:
        return list(traces)

    async def plan_step(self, *_: Any) -> None: ...

    async def end_step(self, _: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.append(metrics)

    def waits(self) -> dict[str, float]:
        return {}

    def add_evaluation(self, _: Any) -> None: ...

    def add_event(self, *_: str) -> None: ...

    def update(self, _: Any) -> None: ...

    def evaluation(self, _: Any) -> None: ...

    def phase(self, _: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Result of a simulated run; seconds are per step, lags in versions per token."""

    step_s: float
    lag_mean: float
    lag_max: int
    hidden: float
    """The share of the syncs' time that no step waited for."""
    aged: float
    """The share of the sampled tokens that were too old to be trained."""


def simulate(durations: Durations, max_lag: int, steps: int, **how: Any) -> Outcome:
    """Simulate a run from its first group to its last sync, with the options of `play`."""
    world, took_s = play(durations, max_lag, steps, **how)
    return outcome(world, took_s / steps)


async def without_a_thread(work: Callable[[], Any]) -> Any:
    """Run work on the simulated loop, which waits for no thread."""
    return work()


def play(
    durations: Durations,
    max_lag: int,
    steps: int,
    *,
    groups: tuple[int, int] = (8, 8),
    seed: int = 0,
    drains: bool = False,
    exposes: bool = False,
    carried: int = 0,
    max_token_age: int | None = None,
) -> tuple[World, float]:
    """Return a world after a run, and its duration; with `exposes` no sync overlaps."""
    prompts, size = groups
    schedule = {"prompts_per_step": prompts, "group_size": size, "max_lag": max_lag}
    schedule["carried_groups"] = carried
    if max_token_age is not None:
        schedule["max_token_age"] = max_token_age
    config = Config.model_validate(
        {
            "run": {"name": "simulated", "steps": steps},
            "data": {"task": "toolbox"},
            "schedule": schedule,
            "trainer": {"checkpoint_every": int(exposes)},
            "eval": {"episodes": 1},
        }
    )
    world: Any = World(durations, seed, drains, config.schedule.oldest_trained)
    ports = Ports(
        *(world, None, world, world, world, world, world.save, world.saved),
        in_thread=without_a_thread,
    )
    heldout = heldout_indices(world, config.eval.episodes)

    async def run() -> float:
        await Controller(config, world, StepBuilder(world), ports, heldout).run()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return world, runner.run(run())


def outcome(world: World, step_s: float) -> Outcome:
    """Return the outcome; the last sync is left out, because it overlaps with no step."""

    def column(key: str) -> list[float]:
        return [cast(float, metrics[key]) for metrics in world.metrics]

    waited, took = column("time/weight_sync_s")[:-1], column("time/weight_sync_total_s")[:-1]
    lags = column("lag/mean")
    hidden = 1 - sum(waited) / sum(took)
    sizes = (one["rollouts/tokens"] * one["rollouts/count"] for one in world.metrics)
    aged = sum(one.get("tokens/aged", 0) for one in world.metrics) / sum(sizes)
    return Outcome(step_s, sum(lags) / len(lags), int(max(column("lag/max"))), hidden, aged)
