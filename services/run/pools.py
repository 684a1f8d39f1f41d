"""The actor pools of a run: number and kind of processes, environment and restart rules.

The hint writer of a run: its pool of one process, and its port.

Used only with writer = "llm"; `hint_writing` makes the requests and uses the replies.

The judges of a run: their pool, which environments call, and what they have cost.

environments -- questions of rewards --> judges       in batches, past the controller
pools -- members change --> MeshJudges --> environments: the judge actors
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.panel.configured import judge_settings
from composer_mesh.actors.panel_actors import HintWriterActor, JudgeActor, TeacherReplayActor
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.process_resources import ADDRESS
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, Recorder
from composer_mesh.mesh.waiting import BackgroundTasks, together
from composer_mesh.planning.mesh_layout import rollout_workers
from composer_mesh.rollouts.budget import BudgetReport, dollars
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.services import service
from composer_mesh.services.checks.keys import ASKING
from composer_mesh.services.episodes.workers import PoolPeers, call_serving, serving
from composer_mesh.services.pool.process_placement import ProcessPlacement, ProcessPlacements
from composer_mesh.services.pool.replicas import Replica, RestartRules
from composer_mesh.services.replay.teacher_settings import hint_settings
from composer_mesh.services.service import Service


@dataclass
class MeshHintWriter:
    """Implements the controller's hint-writer port with the writer's actor."""

    pool: Service
    config: Config
    keys: Keys = field(repr=False)

    async def load(self, expert_url: str, run: Path) -> None:
        """Open its files and connections; raises if the key, address or file is unusable."""
        await self.pool.load(hint_settings(self.config, expert_url, run), self.keys)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """Return one reply per request. Waits at most the writer's own timeout."""
        writer_config = self.config.sdpo.hints.active_writer
        assert writer_config is not None
        # The writer enforces its own timeout; the deadline covers a process that does not answer.
        deadline_s = self.config.run.deadline_s + writer_config.timeout_s
        pool = self.pool.options(deadline_s=deadline_s)
        replies: list[HintReply] = await pool.write(list(requests))
        return replies


@dataclass
class MeshJudges:
    """The pool of judge actors, and the environments that are informed of it."""

    pool: Service
    environments: Service
    config: Config
    keys: Keys = field(repr=False)
    record: Recorder = field(repr=False)
    _spent: int = 0
    _informed: set[str] = field(default_factory=set)
    _judges: PoolPeers = field(init=False, repr=False)
    _tasks: BackgroundTasks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._judges = PoolPeers(self.pool)
        self._tasks = BackgroundTasks(recorded_by(self.record))

    async def load(self, run: Path) -> None:
        """Open connections, ledger and cache; raises if a judge or a file cannot be used."""
        await self.pool.load(judge_settings(self.config, run), self.keys)
        self._spent = (await self._report()).run.spent

    def connect(self) -> None:
        """Tell the environments of the judge actors, now and whenever either change."""
        for pool in (self.pool, self.environments):
            pool.on_change(self._update)
        self._update()

    async def figures(self) -> dict[str, float]:
        """Return the dollars since the last call, and of the whole run with its questions."""
        report = await self._report()
        before, self._spent = self._spent, report.run.spent
        return {
            "judge/usd": dollars(self._spent - before),
            "judge/usd_total": dollars(self._spent),
            "judge/requests": report.run.requests,
        }

    async def close(self) -> None:
        """Stop telling environments; the pool is closed with all others."""
        await self._tasks.close()

    async def _report(self) -> BudgetReport:
        report: BudgetReport = await self.pool.report()
        return report

    def _update(self) -> None:
        changed = self._judges.refresh()
        environments = {one.name: one for one in serving(self.environments)}
        for name in self._informed - environments.keys():
            ending = call_serving(self.pool, "close_calls", name)
            self._tasks.start(f"ending the questions of {name}", ending)
        to_tell = environments.keys() if changed else environments.keys() - self._informed
        for name in to_tell:
            self._tasks.start(f"judges of {name}", self._tell(environments[name]))
        self._informed = set(environments)

    async def _tell(self, environment: Replica) -> None:
        assert environment.actor is not None
        judges, gone = self._judges.peers, dict(self._judges.gone)
        try:
            await environment.actor.call("connect_judges", environment.name, judges, gone)
        except ActorDied:
            return
        except Exception as error:  # noqa: BLE001  supervision boundary: it is replaced
            reason = f"it cannot be informed of the judges: {cause_of(error)}"
            self.environments.lose(environment.name, reason)


UNLIMITED = 1_000_000
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
        return await self._pool("generator", GeneratorActor, count, env, max_outstanding=UNLIMITED)

    async def environments(self) -> Service:
        """Start the environments; an episode attempt is lost with its replica."""
        count = self.config.environment.replicas
        return await self._pool("environment", EnvironmentActor, count, max_outstanding=UNLIMITED)

    async def rollouts(self) -> Service:
        """Start the actors that play episodes; the attempts of one are lost with it."""
        count = rollout_workers(self.config)
        return await self._pool("rollouts", RolloutActor, count, max_outstanding=UNLIMITED)

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
            "judge", JudgeActor, self.config.judges.actors, max_outstanding=UNLIMITED
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
