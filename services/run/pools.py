"""The actor pools of a run: number and kind of processes, environment and restart rules."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.hint_writer import HintWriterActor
from composer_mesh.actors.judge import JudgeActor
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.actors.teacher_replay import TeacherReplayActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.process_resources import ADDRESS
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.waiting import together
from composer_mesh.planning.mesh_layout import rollout_workers
from composer_mesh.services import service
from composer_mesh.services.checks.keys import ASKING
from composer_mesh.services.pool.process_placement import ProcessPlacement, ProcessPlacements
from composer_mesh.services.pool.restarts import RestartRules
from composer_mesh.services.run.hint_mesh import MeshHintWriter
from composer_mesh.services.service import Service

ALL_AT_ONCE = 1_000_000
"""No limit: generators and environments batch and queue by themselves."""
NOTHING: Mapping[str, str] = {}
NO_PROXY = "NO_PROXY"


@dataclass(frozen=True)
class Pools:
    """Starts the pools that a config needs. Each method waits until its processes answer.

    Each process starts at its placement, with its resources on that host. Calls that failed or
    whose process died are retried: all endpoints are idempotent, except for session state.
    """

    config: Config
    host: MeshHost
    placements: ProcessPlacements
    record: Recorder

    async def sampling(self) -> list[Service]:
        """Start generators, environments and rollout workers, and return them in this order."""
        return await together(self.generators(), self.environments(), self.rollouts())

    async def generators(self) -> Service:
        """Start the generators, each with its own policy version."""
        count, env = self.config.generator.replicas, process_environment(self.config)
        return await self._pool(
            "generator", GeneratorActor, count, env, max_outstanding=ALL_AT_ONCE
        )

    async def environments(self) -> Service:
        """Start the environments; an episode attempt is lost with its replica."""
        count = self.config.environment.replicas
        return await self._pool("environment", EnvironmentActor, count, max_outstanding=ALL_AT_ONCE)

    async def rollouts(self) -> Service:
        """Start the actors that play episodes; the attempts of one are lost with it."""
        count = rollout_workers(self.config)
        return await self._pool("rollouts", RolloutActor, count, max_outstanding=ALL_AT_ONCE)

    async def teachers(self) -> Service:
        """Start the interchangeable teacher-replay actors."""
        replay = self.config.replay
        # A panel has its own timeouts; the deadline covers a process that does not answer.
        patience_s = self.config.run.deadline_s + replay.timeout_s
        return await self._pool(
            "teacher_replay",
            TeacherReplayActor,
            replay.actors,
            deadline_s=patience_s,
        )

    async def judges(self) -> Service:
        """Start the interchangeable judge actors."""
        return await self._pool(
            "judge", JudgeActor, self.config.judges.actors, max_outstanding=ALL_AT_ONCE
        )

    async def hint_writer(self, keys: Keys) -> MeshHintWriter:
        """Start the process that writes hints with a language model."""
        pool = await self.one("hint_writer", HintWriterActor)
        return MeshHintWriter(pool, self.config, keys)

    async def one(self, name: str, kind: type[MeshActor]) -> Service:
        """Start a single unreplicated process: calls wait while it is replaced."""
        return await self._pool(name, kind, 1, numbered=False)

    async def _pool(
        self,
        name: str,
        kind: type[MeshActor],
        n: int,
        further: Mapping[str, str] = NOTHING,
        **options: Any,
    ) -> Service:
        def placement(slot: int) -> ProcessPlacement:
            taken = self.placements.take(name, slot)
            asking = {} if taken.host is None else proxy_env(self.config, name)
            return replace(taken, env={**taken.env, **further, **asking})

        rules = self.config.supervision
        options = {"deadline_s": self.config.run.deadline_s} | options
        pool = await service.spawn(
            kind,
            n=n,
            name=name,
            placement=placement,
            host=self.host,
            attempts=1 + rules.rollout_retries,
            restart=RestartRules.of(rules, self.config.run.seed),
            record=self.record,
            **options,
        )
        return pool.options(retry_errors=True)


def proxy_env(config: Config, kind: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment that a process on another host needs for HTTP model requests.

    `NO_PROXY` is extended so that the run's own experts are reached directly. API keys are never
    part of it: they are an argument of the actor's `load`.
    """
    if kind not in ASKING or not config.serves_experts or not environ.get(ADDRESS):
        return {}
    direct = environ.get(NO_PROXY) or environ.get(NO_PROXY.lower()) or ""
    direct = ",".join(filter(None, [direct, environ[ADDRESS]]))
    return {NO_PROXY: direct, NO_PROXY.lower(): direct}
