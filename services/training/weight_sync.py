"""Weight sync: every trainer rank publishes, and generators and teachers pull from all ranks.

Only orders the calls; `mesh.weights` moves the bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.spawned import SpawnedActor, working_together
from composer_mesh.mesh.waiting import together
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.services.service import Service
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.services.training.teaching import SdpoTeachers


class StaleReceiver(Worded, RuntimeError):
    """A receiver reports another version after a pull than the published one."""

    message = "published version {0} but receivers serve {1}"


class MeshWeightSync:
    """Syncs weights from the current trainer to generators and, with SDPO, its teachers.

    Each rank publishes its part of a version, and receivers pull all parts. A publisher has two
    buffers; a version is published only after the previous one was pulled by all, so a buffer is
    never overwritten while it is read.
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
        """Publish and pull the current version, and return it; it is served from now on.

        Waits until each generator serves it, at most the deadline for each call. A receiver that
        dies, fails or is late is dropped and replaced; replacements pull before they serve. Raises
        `ActorDied` if the trainer dies: receivers then keep their former version.

        With `on_snapshot` a step may run concurrently: the trainer keeps the version unchanged
        until it is copied, and teachers, whose outputs belong to the version being trained, pull it
        first.
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
    """Publish the ranks' current version in full. Waits until each rank has copied it."""
    return WeightsHandle.joined(await _ask(trainers, "publish", deadline_s))


async def _ask(trainers: Sequence[SpawnedActor], endpoint: str, deadline_s: float) -> list[Any]:
    """Call an endpoint on all ranks concurrently, since it may be collective."""
    with working_together(lambda: trainers):
        return await together(*(rank.call(endpoint, deadline_s=deadline_s) for rank in trainers))
