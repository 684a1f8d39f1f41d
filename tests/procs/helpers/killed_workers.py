"""Two rollout workers that play one episode after another, and one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services import service
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.service import Service
from composer_mesh.tasks.loading import make_task


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


@asynccontextmanager
async def started_pools(
    folder: Path, host: MeshHost, config: Config, generator: type[MeshActor], *load: Any
) -> AsyncIterator[Pools]:
    """Start the pools of a config; its tokenizer is in the folder, a generator loads `load`."""
    task = make_task(config)
    rules: dict[str, Any] = {"host": host, "restart": RestartRules(5, backoff_s=0.05)}
    play = (config, folder / "tokenizer", {task.name: task.tools})
    workers, *others = await asyncio.gather(
        service.spawn(RolloutActor, n=2, name="rollouts", load=play, **rules),
        service.spawn(generator, n=1, name="generator", load=load, **rules),
        service.spawn(EnvironmentActor, n=1, name="environment", load=(config,), **rules),
    )
    pools = Pools(config, folder, workers, others)
    yield pools
    await pools.rollouts.close()
    await asyncio.gather(*(pool.close() for pool in (workers, *others)))
