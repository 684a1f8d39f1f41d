"""Weights on their way: the trainer publishes a version, everyone who serves it pulls.

Only the order of calls; bytes move in `mesh.weights`.
"""

from collections.abc import Callable

from composer_mesh.mesh.spawn import SpawnedActor
from composer_mesh.mesh.waiting import together
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.services.service import Service
from composer_mesh.services.teaching import SdpoTeachers


class StaleReceiver(RuntimeError):
    """A receiver answered a pull with another version than the published one."""

    def __init__(self, wanted: int, got: list[int]) -> None:
        super().__init__(wanted, got)

    def __str__(self) -> str:
        return f"published version {self.args[0]} but receivers serve {self.args[1]}"


class MeshWeightSync:
    """From the trainer of the time to generators and, where the channel is on, the SDPO teachers.

    The publisher keeps two buffers; a version is published only after the one before it was
    pulled by all, so a buffer is never rewritten under a reader.
    """

    def __init__(
        self,
        trainer: Callable[[], SpawnedActor],
        generators: Service,
        teachers: SdpoTeachers | None,
        deadline_s: float,
    ) -> None:
        self._trainer, self._generators, self._teachers = trainer, generators, teachers
        self._deadline_s = deadline_s

    async def sync(self) -> int:
        """Publish and pull; returns the version that is served from now on.

        Waits until each generator serves it, at most the deadline for each call. A receiver that
        dies, fails or is late is dropped and replaced; one that comes later pulls before it serves.
        The end of the trainer ends it with `ActorDied`: receivers then serve what they served.
        """
        trainer = self._trainer()
        handle: WeightsHandle = await trainer.call("publish", deadline_s=self._deadline_s)
        pulls = [self._generators.setup_from(trainer, "pull", handle)]
        if self._teachers is not None:
            pulls.append(self._teachers.pull(handle, trainer))
        got = [version for versions in await together(*pulls) for version in versions]
        if any(version != handle.version for version in got):
            raise StaleReceiver(handle.version, got)
        return handle.version
