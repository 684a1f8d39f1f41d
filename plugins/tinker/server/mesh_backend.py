"""The trainer and the samplers as supervised services of the mesh.

The ranks that train clients' models are called together, and replaced together when one is lost:

    call     ------x BackendLost                     waits --> result
    ranks    ------x stopped == started, loaded ==== ready

What the ranks held is lost with any of them. The caller that was under way gets `BackendLost`, else
the next one, so that no call reaches new ranks before their models were opened again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.models.ranks import RanksLost
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, Recorder
from composer_mesh.mesh.waiting import cancel_and_wait, together
from composer_mesh.plugins.tinker.models.messages import (
    ModelNotOpen,
    ModelSpec,
    ScoreRequest,
    Scores,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.served_sampler import ServedSamplerActor
from composer_mesh.plugins.tinker.served_trainer import ServedTrainerActor
from composer_mesh.plugins.tinker.server.backend import BackendLost
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services import service
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.pool.process_placement import (
    PlacementOf,
    ProcessPlacement,
    ProcessPlacements,
)
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.pool.restarts import (
    RestartBudget,
    RestartsGivenUp,
    restart,
)
from composer_mesh.services.service import Service
from composer_mesh.services.training.rank_processes import RankProcesses

NAME = "trainer"
PREPARING_S = 3600.0
"""Longest warm start, in addition to its steps."""


def restart_rules(config: Config) -> RestartRules:
    """Return the rules of a server: only starts that fail are counted.

    The attempts of an operation are bounded, so that no operation can use the restarts up.
    """
    return replace(RestartRules.of(config.supervision, config.run.seed), forgives=True)


class ServedRanks:
    """A trainer of one or several ranks, which get calls in one order; replaced when lost."""

    def __init__(self, config: Config, processes: RankProcesses, record: Recorder) -> None:
        rules = restart_rules(config)
        self._config, self._processes, self._record = config, processes, record
        self._budget = RestartBudget(rules, NAME)
        self._folder, self._order = Path(), asyncio.Lock()
        self._unreported, self._vocabulary = "", 0
        self._replacing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.restarts = 0
        """Number of times that the ranks were replaced."""

    @classmethod
    async def start(
        cls, config: Config, host: MeshHost, placement: PlacementOf, record: Recorder
    ) -> ServedRanks:
        """Start all processes. Waits until all answer."""
        processes = RankProcesses(ServedTrainerActor, config, host, placement)
        ranks = cls(config, processes, record)
        await processes.start()
        return ranks

    async def prepare(self) -> Path:
        """Return the folder of the policy. Waits for a warm start if none is cached."""
        wait_s = self._config.policy.warm_start.steps + PREPARING_S
        preparing = self._processes.first.call("prepare", self._config, deadline_s=wait_s)
        self._folder = await self._processes.guard(preparing)
        return self._folder

    async def load(self) -> int:
        """Load the policy on all ranks; return the size of its vocabulary.

        Ranks are replaced if one dies meanwhile.
        """
        try:
            await self._load()
        except ActorDied as died:
            await self._replace(died)
        self._watching = asyncio.create_task(self._watch())
        return self._vocabulary

    async def call(self, endpoint: str, *args: Any) -> Any:
        """Call an endpoint of all ranks; return what the first one answers.

        Waits for earlier calls, so that all ranks get them in one order, and for ranks that are
        being replaced. Raises `BackendLost` where the models are lost, and `NoReplicaLeft` once the
        ranks are not replaced any more.
        """
        async with self._order:
            return await self._call(endpoint, *args)

    async def _call(self, endpoint: str, *args: Any) -> Any:
        if self._replacing is not None:
            await asyncio.shield(self._replacing)
        if self._unreported:
            reason, self._unreported = self._unreported, ""
            raise BackendLost(reason)
        called = self._processes.names()
        try:
            answers = await self._processes.guard(self._processes.on_all(endpoint, *args))
        except ModelNotOpen as error:
            raise BackendLost(str(error)) from error
        except Exception as error:
            cause = await self._cause_of(error)
            if cause is None:
                raise
            if self._processes.names() == called:
                self._lose(cause)
            self._unreported = ""
            raise BackendLost(str(cause)) from error
        return answers[0]

    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        found: int = await self.call("open", model, spec, path)
        return found

    async def close(self, models: Sequence[str]) -> None:
        await self.call("close", list(models))

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        found: list[TrainResult] = await self.call("execute", list(calls))
        return found

    async def save(self, model: str, path: Path) -> int:
        found: int = await self.call("save", model, path)
        return found

    async def end(self) -> None:
        """Stop all processes; nothing is replaced afterwards."""
        await cancel_and_wait(filter(None, [self._watching, self._replacing]))
        await self._processes.stop()

    async def _cause_of(self, error: Exception) -> Exception | None:
        """Return by what the ranks are lost; None for an error of the only one, which continues."""
        if len(self._processes.all) == 1 and not isinstance(error, ActorDied | DeadlineExceeded):
            return None
        return await self._processes.cause_of(error)

    def _lose(self, cause: Exception) -> None:
        """Replace all ranks, once."""
        if self._replacing is None:
            self._unreported = str(cause)
            if not isinstance(cause, ActorDied):
                self._processes.lose(_name_of(cause, self._processes.names()), str(cause))
            self._replacing = asyncio.create_task(self._replace(cause))

    async def _watch(self) -> None:
        """Replace ranks also when one dies between calls."""
        while True:
            await self._processes.until_one_dies()
            if (died := self._processes.died()) is not None:
                self._lose(died)
            if (replacing := self._replacing) is not None:
                await asyncio.wait([replacing])
                if replacing.exception() is not None:
                    return

    async def _replace(self, cause: Exception) -> None:
        former = self._processes.names()
        try:
            await restart(self._budget, cause, self._start_again)
        except RestartsGivenUp as end:
            self._record("actor_given_up", former[0], str(end), **end.fields)
            raise NoReplicaLeft(former[0], str(end)) from None
        self.restarts += 1
        names = self._processes.names()
        detail = f"{len(names)} ranks in place of those before: {cause}"
        self._record("actor_restarted", names[0], detail, replaces=former[0])
        self._replacing = None

    async def _start_again(self) -> None:
        await self._processes.stop()
        await self._processes.start()
        await self._load()

    async def _load(self) -> None:
        async def loaded() -> int:
            await self._processes.connect()
            found = await self._processes.on_all("load", self._config, self._folder)
            return int(found[0])

        self._vocabulary = await self._processes.guard(loaded())


def _name_of(cause: Exception, names: list[str]) -> str:
    """Return the name of the rank that failed, of the first one where it is not known."""
    if isinstance(cause, RanksLost):
        return names[int(cause.args[0])]
    return cause.actor if isinstance(cause, DeadlineExceeded) else names[0]


NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class ServeMesh:
    """The processes of a training server, and what they loaded."""

    trainer: ServedRanks
    samplers: Service
    folder: Path
    vocabulary: int

    @classmethod
    async def start(cls, config: Config, host: MeshHost, record: Recorder) -> ServeMesh:
        """Start and load all processes. Waits for a warm start of the policy, if it has one."""
        placements = ProcessPlacements.of(config)
        for note in placements.notes:
            record("placement", "", note)
        more = process_environment(config)

        def sampling_placement(slot: int) -> ProcessPlacement:
            taken = placements.take("generator", slot)
            return replace(taken, env={**taken.env, **more})

        trainer, samplers = await together(
            ServedRanks.start(config, host, placements.taker("trainer"), record),
            service.spawn(
                ServedSamplerActor,
                n=config.generator.replicas,
                name="sampler",
                attempts=1,  # its callers try again, without the others of the lost process
                max_outstanding=NO_LIMIT,
                placement=sampling_placement,
                host=host,
                restart=restart_rules(config),
                record=record,
                deadline_s=config.run.deadline_s,
            ),
        )
        folder: Path = await trainer.prepare()
        vocabulary, _ = await together(trainer.load(), samplers.load(config, folder))
        return cls(trainer, samplers, folder, vocabulary)

    async def close(self) -> None:
        """Stop all processes."""
        await together(self.trainer.end(), self.samplers.close())


class MeshSampleBackend:
    """The samplers of a server; all of them serve all snapshots."""

    def __init__(self, samplers: Service) -> None:
        self._samplers = samplers

    async def sample(
        self, snapshot: str, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        found = await self._call("sample", snapshot, list(requests))
        for one in found:
            if isinstance(one, RequestAborted):
                raise one
        return list(found)

    async def score(
        self, snapshot: str, sequences: Sequence[list[int]], request: ScoreRequest
    ) -> list[Scores]:
        found: list[Scores] = await self._call("score", snapshot, list(sequences), request)
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._samplers.fanout("abort", list(request_ids))

    async def _call(self, endpoint: str, *args: Any) -> Any:
        try:
            return await self._samplers.call(endpoint, *args)
        except NoReplicaLeft:
            raise
        except (ActorDied, DeadlineExceeded) as error:
            raise BackendLost(str(error)) from error
