"""Weights on their way: every rank of the trainer publishes, everyone who serves pulls from all.

Only the order of calls; bytes move in `mesh.weights`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.waiting import together
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.services.service import Service
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.services.training.teaching import SdpoTeachers


class StaleReceiver(RuntimeError):
    """A receiver answered a pull with another version than the published one."""

    def __init__(self, wanted: int, got: list[int]) -> None:
        super().__init__(wanted, got)

    def __str__(self) -> str:
        return f"published version {self.args[0]} but receivers serve {self.args[1]}"


class MeshWeightSync:
    """From the trainer of the time to generators and, where the channel is on, the SDPO teachers.

    Each rank offers its part of a version, and the parts together are what is pulled. A publisher
    keeps two memories; a version is published only after the one before it was pulled by all, so
    memory is never rewritten under a reader.
    """

    def __init__(
        self,
        trainers: Callable[[], Sequence[SpawnedActor]],
        generators: Service,
        teachers: SdpoTeachers | None,
        deadline_s: float,
    ) -> None:
        self._trainers, self._generators, self._teachers = trainers, generators, teachers
        self._deadline_s = deadline_s

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Publish and pull; returns the version that is served from now on.

        Waits until each generator serves it, at most the deadline for each call. A receiver that
        dies, fails or is late is dropped and replaced; one that comes later pulls before it serves.
        The end of the trainer ends it with `ActorDied`: receivers then serve what they served.

        With `on_snapshot` a step may come beside it: the trainer holds the version until it is
        copied, and teachers, whose signals belong to the version that is trained, pull it first.
        """
        trainers = self._trainers()
        if on_snapshot is not None:
            await _ask(trainers, "hold", self._deadline_s)
            if self._teachers is None:
                on_snapshot()
        handle = await published(trainers, self._deadline_s)
        pulls = [self._generators.broadcast_weights(trainers[0], "pull", handle)]
        if self._teachers is not None:
            pulls.append(self._teach(self._teachers, handle, trainers[0], on_snapshot))
        got = [version for versions in await together(*pulls) for version in versions]
        if any(version != handle.version for version in got):
            raise StaleReceiver(handle.version, got)
        return handle.version

    async def _teach(
        self,
        teachers: SdpoTeachers,
        handle: WeightsHandle,
        trainer: SpawnedActor,
        on_snapshot: MayTrain | None,
    ) -> list[int]:
        got = await teachers.pull(handle, trainer)
        if on_snapshot is not None:
            on_snapshot()
        return got


async def published(trainers: Sequence[SpawnedActor], deadline_s: float) -> WeightsHandle:
    """The version that the trainer's ranks have now, whole. Waits until each has copied it."""
    return WeightsHandle.joined(await _ask(trainers, "publish", deadline_s))


async def _ask(trainers: Sequence[SpawnedActor], endpoint: str, deadline_s: float) -> list[Any]:
    """Ask every rank at once: what they have to do for it, they may have to do together."""
    return await together(*(rank.call(endpoint, deadline_s=deadline_s) for rank in trainers))
