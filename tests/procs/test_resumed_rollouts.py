"""An episode whose rollout worker is killed continues at its last turn, in the same session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from numbered_generator import NumberedGenerator

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services import service
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.service import Service
from composer_mesh.tasks.loading import make_task

TURNS, KILLED_AT = 6, 3
TASK = f"""
import os
from pathlib import Path

from composer_mesh import Session, Task, reward

FOLDER = Path(__file__).parent


def note(text):
    with (FOLDER / "noted").open("a") as noted:
        noted.write(text + "\\n")


class Counted(Session):
    async def start(self):
        self.taken = 0
        note("start")

    def reply(self, text):
        self.taken += 1
        note(repr(text))
        if self.taken == {KILLED_AT} and (FOLDER / "gate").exists():
            note("waits")
            (FOLDER / "gate").read_text()  # a pipe: until the test opens it
        return None if self.taken == {TURNS} else f"{{self.taken}} taken"

    def close(self):
        note("close")


class Counting(Task):
    session_class = Counted

    def rows(self, split):
        return [{{"question": "count"}}]

    def prompt(self, row):
        return row["question"]

    @reward
    def counted(self, transcript):
        return 1.0
"""


class Pools:
    """Two rollout workers, a generator and an environment, and what the controller has recorded."""

    def __init__(self, config: Config, folder: Path, workers: Service, others: list[Service]):
        self.config, self.folder, self.workers = config, folder, workers
        self.environments = others[1]
        self.events: list[tuple[Any, ...]] = []
        lockstep = config.schedule.max_lag == 0
        pools = RolloutPools(workers, *others)
        retries = EpisodeRetries(self.config.supervision, lambda _: None, self.record)
        self.rollouts = Rollouts(RolloutWorkers(pools, self.record, lockstep=lockstep), retries)

    def record(self, *event: Any, **_: Any) -> None:
        self.events.append(event)

    def start(self) -> asyncio.Task[Trace | None]:
        episode = make_task(self.config).episode("train", 0)
        (playing,) = self.rollouts.start(episode, 0, 1, Sampling.training(self.config))
        return playing

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    async def until(self, name: str, line: str, count: int = 1) -> None:
        """Wait until other processes have written so many lines that begin so."""
        while (  # noqa: ASYNC110  other processes write them
            sum(one.startswith(line) for one in self.lines(name)) < count
        ):
            await asyncio.sleep(0.01)

    async def kill_the_worker(self) -> None:
        """Kill the one that plays. Waits until the controller knows."""
        changed = asyncio.Event()
        self.workers.on_change(changed.set)
        abouts = await self.workers.fanout("describe")
        (pid,) = [about["pid"] for about in abouts if about["playing"]]
        os.kill(pid, signal.SIGKILL)
        await changed.wait()


def config_of(folder: Path, max_lag: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "resumed", "steps": 1},
            "data": {"task": f"{folder / 'counting.py'}:Counting"},
            "schedule": {"max_lag": max_lag, "group_size": 2, "prompts_per_step": 1},
        }
    )


@asynccontextmanager
async def started(
    folder: Path, host: MeshHost, hangs_at: int, max_lag: int
) -> AsyncIterator[Pools]:
    (folder / "counting.py").write_text(TASK)
    config = config_of(folder, max_lag)
    task = make_task(config)
    build_tokenizer(["count 1 taken"] * 40, 512).save_pretrained(folder / "tokenizer")
    rules: dict[str, Any] = {"host": host, "restart": RestartRules(5, backoff_s=0.05)}
    load = (config, folder / "tokenizer", {task.name: task.tools})
    generator = folder / "sampled", hangs_at
    workers, *others = await asyncio.gather(
        service.spawn(RolloutActor, n=2, name="rollouts", load=load, **rules),
        service.spawn(NumberedGenerator, n=1, name="generator", load=generator, **rules),
        service.spawn(EnvironmentActor, n=1, name="environment", load=(config,), **rules),
    )
    pools = Pools(config, folder, workers, others)
    yield pools
    await pools.rollouts.close()
    await asyncio.gather(*(pool.close() for pool in (workers, *others)))


@pytest.mark.parametrize(
    ("moment", "max_lag"), [("in a step", 1), ("in a generation", 1), ("in a generation", 0)]
)
async def test_a_killed_workers_episode_continues_and_no_action_is_executed_twice(
    moment: str, max_lag: int, tmp_path: Path, host: MeshHost
) -> None:
    gate = tmp_path / "gate"
    hangs_at = KILLED_AT if moment == "in a generation" else -1
    async with started(tmp_path, host, hangs_at, max_lag) as pools:
        if moment == "in a step":
            os.mkfifo(gate)
        playing = pools.start()
        if moment == "in a step":
            await pools.until("noted", "waits")
            await pools.kill_the_worker()
            await asyncio.to_thread(gate.write_text, "")
            gate.unlink()
        else:
            await pools.until("sampled", f"train-000000-000-{KILLED_AT:02d}")
            await pools.kill_the_worker()
        trace = await playing
        assert trace is not None
        assert [kind for kind, *_ in pools.events] == ["rollout_retried"]
        assert f"resumed from turn {KILLED_AT}: " in pools.events[0][2]
        requests = pools.lines("sampled")
        assert len(requests) == TURNS + (moment == "in a generation")
        assert len(set(requests)) == TURNS  # the one that was lost has the same seed again
        figures = pools.rollouts.retries.figures()
        assert (figures["rollouts/retried"], figures["rollouts/resumed"]) == (1, 1)
        assert await pools.start() == trace  # as it is undisturbed
        await pools.until("noted", "close", 2)
        noted = [one for one in pools.lines("noted") if one != "waits"]
        assert len(noted) == 2 * (TURNS + 2)
        assert noted[: TURNS + 2] == noted[TURNS + 2 :]
        (about,) = await pools.environments.fanout("describe")
        assert about["in_use"] == 0
