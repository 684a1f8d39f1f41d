"""The controller's ports, backed by the actors of a run."""

import zlib
from typing import Any

from composer_mesh.actors.signals import SignalHandle
from composer_mesh.mesh.spawn import SpawnedActor
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.service import Service


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


class MeshTraining:
    """The trainer, with the SDPO teacher's signal for each batch that has hinted views."""

    def __init__(
        self, trainer: SpawnedActor, teacher: SpawnedActor | None, deadline_s: float
    ) -> None:
        self._trainer, self._teacher, self._deadline_s = trainer, teacher, deadline_s

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        """One optimizer step. Waits for the teacher's forward, then for the trainer."""
        signal: SignalHandle | None = None
        if self._teacher is not None and batch.views:
            signal = await self._teacher.call("signal", batch.views, deadline_s=self._deadline_s)
        metrics: dict[str, Any] = await self._trainer.call(
            "train", batch, signal, deadline_s=self._deadline_s
        )
        return {**metrics, "sdpo/bytes": signal.buffer.nbytes if signal else 0}
