"""The actors of one run: which ones its config asks for, started, loaded, and asked how they are.

What they do together is the controller's business; what happens when one dies, the supervisor's.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.expert_http import TOKEN_ENV, new_token
from composer_mesh.actors.expert_panel import Expert
from composer_mesh.actors.expert_server import ExpertServerActor
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.reference import ReferenceActor
from composer_mesh.actors.teacher_replay import TeacherReplayActor
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost, SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded
from composer_mesh.mesh.waiting import together
from composer_mesh.rollouts.tasks import Task
from composer_mesh.services import service
from composer_mesh.services.hint_mesh import MeshHintWriter
from composer_mesh.services.replay.teacher_settings import panel_settings
from composer_mesh.services.service import Service
from composer_mesh.services.status import ActorStatus
from composer_mesh.services.teaching import Record, SdpoTeachers

WARM_START_DEADLINE_S = 1800.0
DESCRIBE_DEADLINE_S = 5.0
ALL_AT_ONCE = 1_000_000
"""Generators and environments batch and queue by themselves: the more they see, the better."""
ON_THIS_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Ranks of one host sum their gradients over its loopback device."""


@dataclass(frozen=True)
class RunMesh:
    """The living actors of a run; a channel that is off has none."""

    config: Config
    host: MeshHost
    trainers: list[SpawnedActor]
    generators: Service
    environments: Service
    teachers: SdpoTeachers | None
    replay: Service | None
    reference: SpawnedActor | None
    experts: SpawnedActor | None
    hints: MeshHintWriter | None
    token: str = field(repr=False)

    @classmethod
    async def start(cls, config: Config, host: MeshHost, record: Record) -> "RunMesh":
        """Start every process at once. Waits until each actor answers."""
        token = new_token()
        teachers = SdpoTeachers(config, host, threads(config.sdpo.threads), record)
        server = host.spawn("expert_server", ExpertServerActor)
        frozen = host.spawn("reference", ReferenceActor, env=threads(1))
        trainers, generators, environments, replay, reference, _, experts, hints = await together(
            _trainers(host, config),
            _pool(host, config, GeneratorActor, "generator", config.generator.replicas),
            _pool(host, config, EnvironmentActor, "environment", config.environment.replicas),
            _if(config.replay.on, _teachers(host, config, token)),
            _if(config.replay.needs_reference, frozen),
            _if(config.sdpo.has_own_actors, teachers.start()),
            _if(config.serves_experts, server),
            _if(config.asks_for_hints, MeshHintWriter.start(config, host, token)),
        )
        own = teachers if config.sdpo.has_own_actors else None
        ring = (trainers, generators, environments)
        return cls(config, host, *ring, own, replay, reference, experts, hints, token)

    @property
    def trainer(self) -> SpawnedActor:
        """The rank that prepares, publishes and saves."""
        return self.trainers[0]

    async def prepare(self) -> Path:
        """The folder of the initial policy. Waits for a warm start where none is cached."""
        folder: Path = await self.trainer.call(
            "prepare", self.config, deadline_s=WARM_START_DEADLINE_S
        )
        return folder

    async def load(self, folder: Path, task: Task, run: Path) -> None:
        """Give every actor what it works with; `run` is the run's directory. Waits for all."""
        config, deadline = self.config, self.config.run.deadline_s
        await self._connect_ranks()
        loads: list[Coroutine[Any, Any, Any]] = [
            *(one.call("load", config, folder, deadline_s=deadline) for one in self.trainers),
            self.generators.fanout("load", config, folder),
            self.environments.fanout("load", config),
        ]
        if self.teachers is not None:
            loads.append(self.teachers.load(folder))
        if self.reference is not None:
            loads.append(self.reference.call("load", config, folder, deadline_s=deadline))
        loads.append(self._load_asking(task, run))
        await asyncio.gather(*loads)

    async def _connect_ranks(self) -> None:
        size, deadline = len(self.trainers), self.config.run.deadline_s
        if size == 1:
            return
        # Private to this user, and only needed until all have met.
        with TemporaryDirectory(prefix="composer-mesh-") as folder:
            meeting = Path(folder) / "ranks"
            await together(
                *(
                    one.call("connect", rank, size, meeting, deadline, deadline_s=deadline)
                    for rank, one in enumerate(self.trainers)
                )
            )

    @property
    def restarts(self) -> int:
        """Actors that were started again."""
        return 0 if self.teachers is None else self.teachers.restarts

    async def close(self) -> None:
        """End what is done beside the run."""
        if self.teachers is not None:
            await self.teachers.close()

    async def _load_asking(self, task: Task, run: Path) -> None:
        """The experts first, because the others must know their address."""
        config, url = self.config.replay, ""
        if self.experts is not None:
            builtin = [teacher for teacher in config.teachers if teacher.kind == "builtin"]
            experts = [Expert(teacher.name, teacher.error_rate or 0.0) for teacher in builtin]
            url = await self.experts.call("load", self.config, experts, self.token)
        if self.replay is not None:
            await self.replay.load(panel_settings(self.config, url, run, task.tools))
        if self.hints is not None:
            await self.hints.load(url, run)

    async def describe(self) -> list[ActorStatus]:
        """How each actor is. Waits a few seconds at most; one that is silent is called busy."""
        return list(await asyncio.gather(*(_describe(actor) for actor in self.host.actors)))


def threads(count: int) -> dict[str, str]:
    """The environment of a process that computes with so many threads.

    Torch counts threads per thread, so only the environment bounds all that an actor starts.
    """
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


async def _trainers(host: MeshHost, config: Config) -> list[SpawnedActor]:
    ranks = config.trainer.ranks
    names = ["trainer"] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)]
    env = threads(config.trainer.threads) | ({} if ranks == 1 else ON_THIS_HOST)
    return await together(*(host.spawn(name, TrainerActor, env=env) for name in names))


async def _pool(host: MeshHost, config: Config, kind: Any, name: str, n: int) -> Service:
    """Replicas with state of their own: an episode or a version is lost with its replica."""
    env = threads(config.generator.threads if kind is GeneratorActor else 1)
    deadline_s = config.run.deadline_s
    return await service.spawn(
        kind,
        n=n,
        host=host,
        name=name,
        deadline_s=deadline_s,
        attempts=1,
        max_outstanding=ALL_AT_ONCE,
        env=env,
    )


async def _teachers(host: MeshHost, config: Config, token: str) -> Service:
    """Replicas that are all alike: what one was asked when it died, another is asked again."""
    replay = config.replay
    return await service.spawn(
        TeacherReplayActor,
        n=replay.actors,
        host=host,
        name="teacher_replay",
        # A panel keeps its own time; the deadline is for a process that does not answer.
        deadline_s=config.run.deadline_s + replay.timeout_s,
        env={TOKEN_ENV: token},
    )


async def _if(wanted: bool, starting: Coroutine[Any, Any, Any]) -> Any:
    if wanted:
        return await starting
    starting.close()
    return None


async def _describe(actor: SpawnedActor) -> ActorStatus:
    try:
        about = await actor.call("describe", deadline_s=DESCRIBE_DEADLINE_S)
    except DeadlineExceeded:
        return ActorStatus(actor.name, actor.kind, actor.pid, "busy", None, "does not answer now")
    except ActorDied as died:
        return ActorStatus(actor.name, actor.kind, actor.pid, "dead", None, died.reason)
    state = "ready" if about["activity"] == "idle" else "busy"
    version = about["policy_version"]
    return ActorStatus(actor.name, actor.kind, actor.pid, state, version, about["activity"])
