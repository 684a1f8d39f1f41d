"""The controller's ports, backed by the actors of a run."""

from collections.abc import Sequence

from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply
from composer_mesh.services.service import Service


class MeshTeachers:
    """Teacher-replay actors; a state goes to the least busy one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        replies: list[TeacherReply] = await self._service.query(state, n=n)
        return replies


class MeshReference:
    """The frozen initial policy in a process of its own."""

    def __init__(self, service: Service, deadline_s: float) -> None:
        self._service = service.options(deadline_s=deadline_s)

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]:
        scores: list[tuple[float, float]] = await self._service.score(list(samples))
        return scores
