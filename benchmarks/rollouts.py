"""What thousands of episodes in flight cost the controller and the rollout workers.

    python benchmarks/rollouts.py [--quick] [--json FILE] [--only NAME]

The rollout workers, their pools, the environment actors and the chat format are a run's own;
generators and the task only sleep, in processes of their own. A level has so many episodes in
flight, each followed by another one in the smaller levels; some have a rollout worker killed on the
way. CPU time is that of the process, per turn of all episodes played. Turns are as long as it takes
to have about `RATE` of them a second, so that what is measured is their cost and not a wait for a
processor.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes import the actors by name, and inherit only the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from report import Report, arguments  # noqa: E402
from rollouts_actors import SleepingEnvironment, SleepingGenerator  # noqa: E402

from composer_mesh.actors.models.policy import build_tokenizer, frame  # noqa: E402
from composer_mesh.actors.rollouts import RolloutActor  # noqa: E402
from composer_mesh.configs.schema import Config  # noqa: E402
from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402
from composer_mesh.planning.mesh_layout import rollout_workers  # noqa: E402
from composer_mesh.rollouts.episode import Sampling  # noqa: E402
from composer_mesh.rollouts.tasks import Episode  # noqa: E402
from composer_mesh.services import service  # noqa: E402
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts  # noqa: E402
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers  # noqa: E402
from composer_mesh.services.pool.replicas import RestartRules  # noqa: E402
from composer_mesh.services.run.preload import PRELOAD  # noqa: E402
from composer_mesh.services.service import Service  # noqa: E402
from composer_mesh.tasks.toolbox import ToolboxTask  # noqa: E402

RATE = 300.0
"""Turns a second, which leaves two cores time to spare."""
GROUP = 8
BEAT_S = 0.05


@dataclass(frozen=True)
class Level:
    """So many episodes in flight, each of `turns` turns of `tokens` sampled and `words` read."""

    name: str
    in_flight: int
    turns: int = 10
    tokens: int = 50
    words: int = 20
    kill: bool = False
    rounds: int = 2
    """How often each place is filled."""

    @property
    def turn_s(self) -> float:
        """Seconds of a turn, in the generator and the environment together."""
        return self.in_flight / RATE


LEVELS = (
    Level("100", 100, kill=True),
    Level("1,000", 1000, kill=True),
    Level("5,000", 5000, rounds=1),
    Level("10,000", 10_000, rounds=1),
    Level("100 long", 100, turns=30, tokens=300, words=330),
    Level("500 long", 500, turns=30, tokens=300, words=330),
)
QUICK = (Level("100", 100, turns=5, kill=True), Level("1,000", 1000, turns=5))


@dataclass(frozen=True)
class Found:
    """The measurements of one level; lags in milliseconds, memory in bytes per episode."""

    level: Level
    finished: int
    lost: int
    turns: int
    controller_ms: float
    worker_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    worker_bytes: float
    turns_per_s: float
    environment_bytes: float
    resumed: int
    """Attempts that continued after the death of their worker."""
    played_again: int
    """Turns that were played again after it."""

    @property
    def controller_ms_per_rollout(self) -> float:
        """CPU time of the controller for each episode."""
        return self.controller_ms * self.turns / self.finished


class Lag:
    """How late the event loop wakes a task that sleeps."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def watch(self) -> None:
        """Measure for ever."""
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            await asyncio.sleep(BEAT_S)
            self.late_ms.append((now() - began - BEAT_S) * 1e3)

    def percentile(self, percent: int) -> float:
        """Return a percentile, in milliseconds."""
        return statistics.quantiles(self.late_ms, n=100)[percent - 1]


def config_of(level: Level) -> Config:
    """Return a run that may lag, with as many workers as its episodes in flight give it."""
    context = (level.tokens + 3 * level.words + 100) * (level.turns + 1)
    return Config.model_validate(
        {
            "run": {"name": "rollouts", "steps": 1, "deadline_s": 3600.0},
            "data": {"task": "toolbox"},
            "policy": {"max_context": context, "vocab_size": 512},
            "generator": {"max_new_tokens": level.tokens},
            "trainer": {"microbatch_tokens": context},
            "schedule": {
                "prompts_per_step": max(1, level.in_flight // (2 * GROUP)),
                "group_size": GROUP,
                "max_lag": 1,
            },
            "eval": {"episodes": 1},
        }
    )


def tokenizer_folder(task: ToolboxTask, folder: Path) -> Path:
    """Write a tokenizer that was trained on a task's own texts."""
    texts = [frame(task.tools)] * 40
    texts += [task.prompt(task.episode("train", n).payload) for n in range(200)]
    build_tokenizer(texts, 512).save_pretrained(folder)
    return folder


class Bench:
    """The pools of one level, and what its episodes cost."""

    def __init__(self, level: Level, workers: Service, environments: Service) -> None:
        self.level, self.workers, self.environments = level, workers, environments
        self._spent: dict[str, float] = {}

    async def measure(self, rollouts: Rollouts, sampling: Sampling) -> Found:
        """Play the episodes of the level. Waits for the last one."""
        lag, before = Lag(), await self._worker_s()
        idle_bytes = sum(about["rss_bytes"] for about in await self.workers.fanout("describe"))
        watching = asyncio.create_task(lag.watch())
        cpu, wall = time.process_time(), time.perf_counter()
        idle_environment = sum(await self._environments("rss_bytes"))
        traces, seen, environment = await self._play(rollouts, sampling)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        watching.cancel()
        spent = await self._worker_s() - before
        finished = [trace for trace in traces if trace is not None]
        turns = sum(len(trace.turns) for trace in finished)
        return Found(
            self.level,
            len(finished),
            len(traces) - len(finished),
            turns,
            cpu * 1e3 / turns,
            spent * 1e3 / turns,
            lag.percentile(50),
            lag.percentile(99),
            max(lag.late_ms),
            (seen - idle_bytes) / self.level.in_flight,
            turns / wall,
            (environment - idle_environment) / self.level.in_flight,
            rollouts.retries.figures()["rollouts/resumed"],
            sum(await self._environments("actions")) - turns,
        )

    async def _environments(self, name: str) -> list[int]:
        """Return what each environment says of itself."""
        return [about[name] for about in await self.environments.fanout("describe")]

    async def _play(self, rollouts: Rollouts, sampling: Sampling) -> tuple[list[Any], int, int]:
        numbers = iter(range(self.level.rounds * self.level.in_flight // GROUP))
        traces: list[Any] = []
        playing = [
            asyncio.create_task(self._groups(rollouts, sampling, numbers, traces))
            for _ in range(max(1, self.level.in_flight // GROUP))
        ]
        await asyncio.sleep(self.level.turn_s * self.level.turns / 2)
        seen = [about["rss_bytes"] for about in await self.workers.fanout("describe")]
        environment = sum(await self._environments("rss_bytes"))
        if self.level.kill:
            victim = self.workers.replicas[0].actor
            assert victim is not None
            await self._note_worker_s()
            os.kill(victim.pid, signal.SIGKILL)
        await asyncio.gather(*playing)
        return traces, sum(seen), environment

    async def _groups(
        self, rollouts: Rollouts, sampling: Sampling, numbers: Iterator[int], traces: list[Any]
    ) -> None:
        for number in numbers:
            episode = Episode("toolbox", "train", number, {"question": f"question {number}"})
            traces += await asyncio.gather(*rollouts.start(episode, number, GROUP, sampling))

    async def _worker_s(self) -> float:
        """Return the CPU seconds of all worker processes so far, also of killed ones."""
        await self._note_worker_s()
        return sum(self._spent.values())

    async def _note_worker_s(self) -> None:
        for replica in self.workers.replicas:
            if replica.serving and replica.actor is not None:
                with suppress(Exception):
                    about = await replica.actor.call("describe")
                    self._spent[replica.name] = about["cpu_seconds"]


async def measure(level: Level) -> Found:
    """Start the processes of a level, measure it and end them."""
    config, task = config_of(level), ToolboxTask.create()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer_folder(task, folder)
        host = await stack.enter_async_context(MeshHost(Supervisor(), preload=PRELOAD))
        rules: dict[str, Any] = {"host": host, "restart": RestartRules(5), "attempts": 2}
        many: dict[str, Any] = {"max_outstanding": 1_000_000}
        sleeping = 0.5 * level.turn_s
        workers, generators, environments = await asyncio.gather(
            service.spawn(
                RolloutActor,
                n=rollout_workers(config),
                name="rollouts",
                load=(config, folder, {task.name: task.tools}),
                **rules,
                **many,
            ),
            service.spawn(
                SleepingGenerator, n=2, name="generator", load=(sleeping, level.tokens), **rules
            ),
            service.spawn(
                SleepingEnvironment,
                n=2,
                name="environment",
                load=(sleeping, level.turns, level.words),
                **rules,
            ),
        )
        pools = RolloutPools(workers, generators, environments)
        retries = EpisodeRetries(config.supervision, lambda _: None, _shown)
        rollouts = Rollouts(RolloutWorkers(pools, _shown, lockstep=False), retries)
        try:
            bench = Bench(level, workers, environments)
            return await bench.measure(rollouts, Sampling.training(config))
        finally:
            await rollouts.close()
            await asyncio.gather(*(pool.close() for pool in (workers, generators, environments)))


def _shown(kind: str, actor: str, detail: str, /, **_fields: Any) -> None:
    print(f"event {kind} {actor} {detail}", file=sys.stderr)


def fill(report: Report, found: Sequence[Found]) -> None:
    """Print the table and fill the report."""
    rows = [
        (
            one.level.name,
            f"{one.level.turns} x {one.level.tokens}",
            f"{one.turns_per_s:.0f}",
            f"{one.controller_ms:.3f}",
            f"{one.worker_ms:.2f}",
            f"{one.lag_p50_ms:.1f}",
            f"{one.lag_p99_ms:.1f}",
            f"{one.lag_max_ms:.0f}",
            f"{one.worker_bytes / 1024:.0f}",
            f"{one.environment_bytes / 1024:.0f}",
            str(one.lost),
            f"{one.resumed}" if one.level.kill else "",
            f"{one.played_again}" if one.level.kill else "",
        )
        for one in found
    ]
    columns = ("in flight", "turns x tokens", "turns/s", "controller ms/turn", "worker ms/turn")
    lags = ("lag p50 ms", "p99", "max", "worker KiB/episode", "environment KiB/episode", "lost")
    deaths = ("resumed", "turns played again")
    report.print_table("episodes in flight", (*columns, *lags, *deaths), rows)
    for one in found:
        report.figures |= {
            f"controller_ms_per_turn, {one.level.name}": one.controller_ms,
            f"worker_ms_per_turn, {one.level.name}": one.worker_ms,
            f"loop_lag_p99_ms, {one.level.name}": one.lag_p99_ms,
            f"worker_bytes_per_episode, {one.level.name}": one.worker_bytes,
            f"environment_bytes_per_episode, {one.level.name}": one.environment_bytes,
            f"turns_played_again, {one.level.name}": one.played_again,
        }
    report.ratios["controller_ms_per_turn"] = max(one.controller_ms for one in found)
    report.ratios["worker_ms_per_turn"] = max(one.worker_ms for one in found)
    report.ratios["loop_lag_p99_ms"] = max(one.lag_p99_ms for one in found)
    short = sorted((one for one in found if one.level.turns <= 10), key=lambda f: f.level.in_flight)
    if len(short) > 1:
        large = short[-1]
        small = next((one for one in short if one.level.in_flight == 1000), short[0])
        report.ratios["growth_10k_over_1k"] = (
            large.controller_ms_per_rollout / small.controller_ms_per_rollout
        )
    report.ratios["traces_lost"] = float(sum(one.lost for one in found))


async def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", metavar="NAME", help="measure one level")
    given = parser.parse_args()
    levels = QUICK if given.quick else LEVELS
    chosen = [one for one in levels if given.only in (None, one.name)]
    report = Report("rollouts")
    found = [await measure(level) for level in chosen]
    fill(report, found)
    report.finish(given.json)


if __name__ == "__main__":
    asyncio.run(main())
