"""The controller's ports, backed by the actors of a run."""

import zlib
from collections.abc import Coroutine, Sequence
from typing import Any

from composer_mesh.actors.trainer import TrainReply
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import SpawnedActor
from composer_mesh.mesh.waiting import together
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply
from composer_mesh.rollouts.step_plan import plan_step
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.service import Service
from composer_mesh.services.teaching import SdpoTeachers

LARGEST = ("sdpo/teacher_version", "sdpo/bytes_per_token", "time/sdpo_bytes_per_s")
"""Figures that are no sums over ranks."""


class MeshEnvironments:
    """Environment actors; a session stays with the replica that its name falls on."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        messages: list[Message] = await self._on(session_id, "begin", episode)
        return messages

    async def step(self, session_id: str, text: str) -> StepResult:
        result: StepResult = await self._on(session_id, "step", text)
        return result

    async def finish(self, session_id: str) -> list[Message]:
        messages: list[Message] = await self._on(session_id, "finish")
        return messages

    async def _on(self, session_id: str, endpoint: str, *args: Any) -> Any:
        index = zlib.crc32(session_id.encode()) % len(self._service)
        return await self._service.on(index, endpoint, session_id, *args)


class MeshTeachers:
    """Teacher-replay actors; a state goes to the least busy one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        replies: list[TeacherReply] = await self._service.query(state, n=n)
        return replies


class MeshReference:
    """The frozen initial policy in a process of its own."""

    def __init__(self, actor: SpawnedActor, deadline_s: float) -> None:
        self._actor, self._deadline_s = actor, deadline_s

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]:
        scores: list[tuple[float, float]] = await self._actor.call(
            "score", list(samples), deadline_s=self._deadline_s
        )
        return scores


class MeshTraining:
    """The trainer's ranks, and the SDPO teachers that serve them."""

    def __init__(
        self, config: Config, ranks: Sequence[SpawnedActor], teachers: SdpoTeachers | None
    ) -> None:
        self._ranks, self._teachers = ranks, teachers
        self._budget, self._deadline_s = config.trainer.microbatch_tokens, config.run.deadline_s

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        """One optimizer step on all ranks. Waits for the teachers' signals and for the slowest."""
        alive: Sequence[SpawnedActor] = []
        if self._teachers is not None and batch.views:
            alive = await self._teachers.ready(batch.step)
        work: list[Coroutine[Any, Any, Any]] = [
            rank.call("train", batch, len(alive), deadline_s=self._deadline_s)
            for rank in self._ranks
        ]
        if self._teachers is not None and alive:
            plans = plan_step(batch, self._budget, len(self._ranks))
            work.append(self._teachers.feed(batch, plans, alive, self._ranks))
        replies: list[TrainReply] = (await together(*work))[: len(self._ranks)]
        return {**replies[0].metrics, **joined([reply.figures for reply in replies])}


def joined(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of a step from those of its ranks: sums, but for rates and versions."""
    total: dict[str, float] = {"sdpo/bytes": 0}
    for figures in ranks:
        for name, value in figures.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name in LARGEST else before + value
    return total
