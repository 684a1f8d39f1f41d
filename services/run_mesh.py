"""The actors of one run: which ones its config asks for, started, loaded, and asked how they are.

What they do together is the controller's business; what happens when one dies, the supervisor's.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.expert_http import TOKEN_ENV, new_token
from composer_mesh.actors.expert_panel import Expert
from composer_mesh.actors.expert_server import ExpertServerActor
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.provider import TeacherEndpoint
from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.actors.teacher_replay import TeacherReplayActor
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost, SpawnedActor
from composer_mesh.mesh.supervision import DeadlineExceeded, together
from composer_mesh.rollouts.tasks import Task
from composer_mesh.services import service
from composer_mesh.services.service import Service
from composer_mesh.services.status import ActorStatus

WARM_START_DEADLINE_S = 1800.0
DESCRIBE_DEADLINE_S = 5.0


@dataclass(frozen=True)
class RunMesh:
    """The living actors of a run; a channel that is off has none."""

    config: Config
    host: MeshHost
    trainer: SpawnedActor
    generators: Service
    environments: Service
    teacher: SpawnedActor | None
    replay: Service | None
    experts: SpawnedActor | None
    token: str = field(repr=False)

    @classmethod
    async def start(cls, config: Config, host: MeshHost) -> "RunMesh":
        """Start every process at once. Waits until each actor answers."""
        token = new_token()
        teacher = host.spawn("sdpo_teacher", SDPOTeacherActor, env=threads(config.sdpo.threads))
        server = host.spawn("expert_server", ExpertServerActor)
        trainer, generators, environments, replay, teacher_, experts = await together(
            host.spawn("trainer", TrainerActor, env=threads(config.trainer.threads)),
            _pool(host, config, GeneratorActor, "generator", config.generator.replicas),
            _pool(host, config, EnvironmentActor, "environment", config.environment.replicas),
            _if(
                config.replay.on,
                service.spawn(
                    TeacherReplayActor,
                    n=config.replay.actors,
                    host=host,
                    name="teacher_replay",
                    deadline_s=config.run.deadline_s,
                    env={TOKEN_ENV: token},
                ),
            ),
            _if(config.sdpo.on, teacher),
            _if(config.replay.on and config.replay.has_builtin_teachers, server),
        )
        return cls(
            config, host, trainer, generators, environments, teacher_, replay, experts, token
        )

    async def prepare(self) -> Path:
        """The folder of the initial policy. Waits for a warm start where none is cached."""
        folder: Path = await self.trainer.call(
            "prepare", self.config, deadline_s=WARM_START_DEADLINE_S
        )
        return folder

    async def load(self, folder: Path, task: Task) -> None:
        """Give every actor what it works with. Waits for the slowest."""
        config, deadline = self.config, self.config.run.deadline_s
        loads: list[Coroutine[Any, Any, Any]] = [
            self.trainer.call("load", config, folder, deadline_s=deadline),
            self.generators.fanout("load", config, folder),
            self.environments.fanout("load", config),
        ]
        if self.teacher is not None:
            loads.append(self.teacher.call("load", config, folder, deadline_s=deadline))
        if self.replay is not None:
            loads.append(self._load_replay(self.replay, task))
        await asyncio.gather(*loads)

    async def _load_replay(self, replay: Service, task: Task) -> None:
        config, url = self.config.replay, ""
        if self.experts is not None:
            builtin = [teacher for teacher in config.teachers if teacher.kind == "builtin"]
            experts = [Expert(teacher.name, teacher.error_rate or 0.0) for teacher in builtin]
            url = await self.experts.call("load", self.config, experts, self.token)
        await replay.fanout("load", endpoints(self.config, url), task.tools, config.timeout_s)

    async def describe(self) -> list[ActorStatus]:
        """How each actor is. Waits a few seconds at most; one that is silent is called busy."""
        return list(await asyncio.gather(*(_describe(actor) for actor in self.host.actors)))


def endpoints(config: Config, expert_url: str) -> list[TeacherEndpoint]:
    """Where each configured teacher is asked."""
    return [
        TeacherEndpoint(teacher.name, expert_url, teacher.name, TOKEN_ENV)
        if teacher.kind == "builtin"
        else TeacherEndpoint(
            teacher.name, str(teacher.base_url), str(teacher.model), teacher.api_key_env
        )
        for teacher in config.replay.teachers
    ]


def threads(count: int) -> dict[str, str]:
    """The environment of a process that computes with so many threads.

    Torch counts threads per thread, so only the environment bounds all that an actor starts.
    """
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


async def _pool(host: MeshHost, config: Config, kind: Any, name: str, n: int) -> Service:
    env = threads(config.generator.threads if kind is GeneratorActor else 1)
    deadline_s = config.run.deadline_s
    return await service.spawn(kind, n=n, host=host, name=name, deadline_s=deadline_s, env=env)


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
    state = "ready" if about["activity"] == "idle" else "busy"
    version = about["policy_version"]
    return ActorStatus(actor.name, actor.kind, actor.pid, state, version, about["activity"])
