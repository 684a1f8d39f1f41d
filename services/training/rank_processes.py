"""Processes that are the ranks of one actor: started, connected, watched and replaced together.

A rank's death breaks the process groups of the others, so that none of them is replaced alone.

The trainer's processes, one per rank: starts, connects, loads and replaces them together.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.models.rank_actor import RankActor
from composer_mesh.actors.models.ranks import Division, Rendezvous
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, working_together
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, HostLost
from composer_mesh.mesh.waiting import together, unless
from composer_mesh.planning.placement_solver import check_together
from composer_mesh.services.pool.process_placement import PlacementOf, ProcessPlacement
from composer_mesh.services.pool.replicas import LOOK_S, wait_for_capacity

T = TypeVar("T")

NEWS_S = 3.0
"""Longest delay between an error that a rank's death caused elsewhere and the report of the death.
"""
ON_THIS_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Ranks on one host sum gradients over its loopback device; others find their interface."""


class RankProcesses:
    """Trainer processes named `trainer`, or `trainer-0`, …; a restart appends `.2`, `.3`, …."""

    def __init__(
        self,
        actor_class: type[RankActor],
        config: Config,
        host: MeshHost,
        placement: PlacementOf,
        look_s: float = LOOK_S,
        news_s: float = NEWS_S,
    ) -> None:
        size = config.trainer.ranks
        self._actor_class = actor_class
        self._config, self._host, self._placement = config, host, placement
        self._look_s, self._news_s = look_s, news_s
        self._meet = size > 1 or config.trainer.sharded
        self._placements: list[ProcessPlacement] = []
        self._names = ["trainer"] if size == 1 else [f"trainer-{rank}" for rank in range(size)]
        self._deadline_s = config.run.deadline_s
        self._longest_wait_s = config.run.deadline_s + config.islands.longest_wait_s
        self._generation = 0
        self._current = self._names
        self.all: list[SpawnedActor] = []
        self._started = asyncio.Event()

    @property
    def first(self) -> SpawnedActor:
        """Rank 0, which prepares the policy, publishes and writes."""
        return self.all[0]

    def names(self) -> list[str]:
        """Return the ranks' current process names, or those of their last start."""
        return list(self._current)

    async def start(self) -> None:
        """Start every rank's process. Waits until all answer.

        Waits for another host if they do not fit on those of the run.
        """
        self._generation += 1
        suffix = f".{self._generation}" if self._generation > 1 else ""
        self._current = [name + suffix for name in self._names]
        self._placements = await wait_for_capacity(
            lambda: [self._placement(rank) for rank in range(len(self._names))],
            self._host,
            self._current[0],
            self._look_s,
        )
        check_together(self._config, {placement.host for placement in self._placements})
        try:
            self.all = await together(*(self._spawn(rank) for rank in range(len(self._names))))
        except BaseException:
            started = [one for one in self._host.actors if one.name in self._current]
            await asyncio.gather(*(self._host.stop(one) for one in started))
            raise
        self._started.set()

    async def stop(self) -> None:
        """Stop every rank's process, dead or alive. Waits until they are gone."""
        await asyncio.gather(*(self._host.stop(one) for one in self.all))
        self.all = []
        self._started.clear()

    async def on_all(self, endpoint: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Call an endpoint of every rank; return the answers in order of ranks. Waits for all."""
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        with working_together(lambda: self.all):
            return await together(
                *(one.call(endpoint, *args, deadline_s=wait_s) for one in self.all)
            )

    async def connect(self) -> None:
        """Let the ranks find each other, before they load; one rank has nobody to find."""
        if len(self.all) == 1:
            return
        if self._placements[0].host is not None:  # this machine's files are not visible there
            opening = self._call(self.first, "open_rendezvous", self._deadline_s, self._apart)
            await self._rendezvous_at(await opening)
            return
        # Readable by this user only, and needed only until all ranks are connected.
        with TemporaryDirectory(prefix="composer-mesh-") as folder:
            await self._rendezvous_at(Path(folder) / "ranks")

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that needs all ranks; raises `ActorDied` when one of them dies.

        The work is not started if a rank is already dead.
        """
        if (dead := self.died()) is not None:
            work.close()
            raise dead
        return await unless(work, self._deaths(), self.died)

    async def cause_of(self, error: Exception) -> Exception:
        """Return the rank's death that explains an error of work on all ranks, or the error itself.

        Waits `news_s` for it, since other ranks may fail before the death is reported.
        """
        if isinstance(error, ActorDied):
            self.lose(error.actor, error.reason)
            return self.died() or error
        deaths = self._deaths()
        if deaths:
            await asyncio.wait(deaths, timeout=self._news_s, return_when=asyncio.FIRST_COMPLETED)
        return self.died() or error

    def lose(self, name: str, reason: str) -> None:
        """Count a rank as dead that a caller knows to be; does nothing for another actor."""
        for one in self.all:
            if one.name == name:
                self._host.lost(one, reason)

    async def until_one_dies(self) -> None:
        """Wait until a rank dies, and before that until the ranks are started."""
        await self._started.wait()
        await asyncio.wait(self._deaths(), return_when=asyncio.FIRST_COMPLETED)

    def died(self) -> ActorDied | None:
        """Return the death of a rank that has not been replaced, or None."""
        for death in self._deaths():
            if death.done():
                return ActorDied(*death.result().args)
        return None

    def _deaths(self) -> list[asyncio.Future[ActorDied]]:
        return [one.death for one in self.all if one.death is not None]

    async def _spawn(self, rank: int) -> SpawnedActor:
        placement = self._placements[rank]
        if self._meet and not self._apart:
            placement = replace(placement, env={**placement.env, **ON_THIS_HOST})
        name = self._current[rank]
        try:
            return await self._host.spawn(
                name,
                self._actor_class,
                on=placement.host,
                env=placement.env,
                policy=FaultPolicy.OWNER,
            )
        except HostLost as lost:
            raise ActorDied(name, str(lost)) from None

    @property
    def _apart(self) -> bool:
        """Whether the ranks are on more than one host."""
        return len({placement.host for placement in self._placements}) > 1

    async def _call(self, one: SpawnedActor, endpoint: str, *args: Any) -> Any:
        return await one.call(endpoint, *args, deadline_s=self._deadline_s)

    async def _rendezvous_at(self, rendezvous: Rendezvous) -> None:
        size, trainer = len(self.all), self._config.trainer
        divided = Division(trainer.context_parallel, trainer.expert_parallel)
        await together(
            *(
                self._call(one, "connect", rank, size, rendezvous, self._longest_wait_s, divided)
                for rank, one in enumerate(self.all)
            )
        )


WARM_START_DEADLINE_S = 1800.0
WRITE_DEADLINE_S = 1800.0
"""Checkpoints are written concurrently with steps, so only a hung disk exceeds this."""


class TrainerRanks(RankProcesses):
    """The ranks of a run's trainer, which begin again from a checkpoint together."""

    def __init__(
        self,
        config: Config,
        host: MeshHost,
        placement: PlacementOf,
        look_s: float = LOOK_S,
        news_s: float = NEWS_S,
    ) -> None:
        super().__init__(TrainerActor, config, host, placement, look_s, news_s)
        self._folder: Path | None = None

    async def prepare(self) -> Path:
        """Return the folder of the initial policy. Waits for a warm start if none is cached."""
        folder: Path = await self.first.call(
            "prepare", self._config, deadline_s=WARM_START_DEADLINE_S
        )
        return folder

    async def load(self, folder: Path, checkpoint: Path | None = None) -> int:
        """Connect the ranks and load the initial policy, or a checkpoint of it.

        Returns the version that is loaded.
        """
        self._folder = folder
        await self.connect()
        wait_s = self._longest_wait_s
        versions: list[int] = await self.on_all(
            "load", self._config, folder, checkpoint, deadline_s=wait_s
        )
        return versions[0]

    async def save(self, draft: Path, export: bool) -> None:
        """Start writing a checkpoint to an absolute path. Waits until all states are copied."""
        await self.on_all("save", draft, export)

    async def saved(self) -> list[WrittenFile]:
        """Return the files of the started checkpoint. Waits until all ranks have written theirs."""
        written = await self.on_all("saved", deadline_s=WRITE_DEADLINE_S)
        return [one for files in written for one in files]

    async def restart_from(self, checkpoint: Path | None) -> int:
        """Replace all ranks with new processes, load a checkpoint and return its version.

        A single rank cannot be replaced, as the process group of the others is broken. If not all
        can start none is left running, and none of them counts as a death.
        """
        assert self._folder is not None, "ranks that never loaded have nothing to restart from"
        await self.stop()
        await self.start()
        return await self.load(self._folder, checkpoint)
