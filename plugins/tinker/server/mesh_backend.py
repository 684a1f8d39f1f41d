"""The trainer and the samplers as supervised services of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, Recorder
from composer_mesh.mesh.waiting import together
from composer_mesh.plugins.tinker.models.messages import (
    ModelSpec,
    ScoreRequest,
    Scores,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.served_sampler import ServedSamplerActor
from composer_mesh.plugins.tinker.server.backend import BackendLost
from composer_mesh.plugins.tinker.server.trainer_ranks import ServedRanks, restart_rules
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services import service
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.pool.process_placement import ProcessPlacement, ProcessPlacements
from composer_mesh.services.service import Service

ALL_AT_ONCE = 1_000_000


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
                max_outstanding=ALL_AT_ONCE,
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
        await together(self.trainer.close(), self.samplers.close())


class MeshTrainBackend:
    """The trainer of a server, all of its ranks; they are replaced without the models they held."""

    def __init__(self, ranks: ServedRanks) -> None:
        self._ranks = ranks

    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        found: int = await self._ranks.call("open", model, spec, path)
        return found

    async def close(self, models: Sequence[str]) -> None:
        await self._ranks.call("close", list(models))

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        found: list[TrainResult] = await self._ranks.call("execute", list(calls))
        return found

    async def save(self, model: str, path: Path) -> int:
        found: int = await self._ranks.call("save", model, path)
        return found


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
