"""The trainer and the samplers as supervised services of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.served_models.messages import (
    ModelNotOpen,
    ModelSpec,
    ScoreRequest,
    Scores,
    TrainCall,
    TrainResult,
)
from composer_mesh.actors.served_sampler import ServedSamplerActor
from composer_mesh.actors.served_trainer import ServedTrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, Recorder
from composer_mesh.mesh.waiting import together
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services import service
from composer_mesh.services.pool.errors import NoReplicaLeft
from composer_mesh.services.pool.process_placement import ProcessPlacement, ProcessPlacements
from composer_mesh.services.pool.restarts import RestartRules
from composer_mesh.services.serve.backend import BackendLost
from composer_mesh.services.service import Service

ALL_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class ServeMesh:
    """The processes of a training server, and what they loaded."""

    trainer: Service
    samplers: Service
    folder: Path
    vocabulary: int

    @classmethod
    async def start(cls, config: Config, host: MeshHost, record: Recorder) -> ServeMesh:
        """Start and load all processes. Waits for a warm start of the policy, if it has one."""
        placements = ProcessPlacements.of(config)
        for note in placements.notes:
            record("placement", "", note)
        rules = RestartRules.of(config.supervision, config.run.seed)
        common: dict[str, Any] = {
            "host": host,
            "restart": rules,
            "record": record,
            "deadline_s": config.run.deadline_s,
        }
        more = process_environment(config)

        def sampling_placement(slot: int) -> ProcessPlacement:
            taken = placements.take("generator", slot)
            return replace(taken, env={**taken.env, **more})

        trainer, samplers = await together(
            service.spawn(
                ServedTrainerActor,
                n=1,
                name="trainer",
                attempts=1,
                numbered=False,
                placement=partial(placements.take, "trainer"),
                **common,
            ),
            service.spawn(
                ServedSamplerActor,
                n=config.generator.replicas,
                name="sampler",
                attempts=1 + config.supervision.rollout_retries,
                max_outstanding=ALL_AT_ONCE,
                placement=sampling_placement,
                **common,
            ),
        )
        prepared = trainer.options(deadline_s=config.policy.warm_start.steps + 3600.0)
        folder: Path = await prepared.call("prepare", config)
        loaded, _ = await together(trainer.load(config, folder), samplers.load(config, folder))
        return cls(trainer, samplers, folder, int(loaded[0]))

    async def close(self) -> None:
        """Stop all processes."""
        await together(self.trainer.close(), self.samplers.close())


class MeshTrainBackend:
    """The one trainer of a server; a dead one is replaced, with none of the models it held."""

    def __init__(self, trainer: Service) -> None:
        self._trainer = trainer

    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        found: int = await self._call("open", model, spec, path)
        return found

    async def close(self, models: Sequence[str]) -> None:
        await self._call("close", list(models))

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        found: list[TrainResult] = await self._call("execute", list(calls))
        return found

    async def save(self, model: str, path: Path) -> int:
        found: int = await self._call("save", model, path)
        return found

    async def _call(self, endpoint: str, *args: Any) -> Any:
        """Call the trainer; one that did not answer in time may still change what it holds."""
        replica = self._trainer.replicas[0].name
        try:
            return await self._trainer.call(endpoint, *args)
        except NoReplicaLeft:
            raise
        except DeadlineExceeded as error:
            self._trainer.lose(replica, str(error))
            raise BackendLost(str(error)) from error
        except (ActorDied, ModelNotOpen) as error:
            raise BackendLost(str(error)) from error


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
