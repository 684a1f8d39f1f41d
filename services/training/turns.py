"""The turns of the actors that share GPUs (`placement.colocate`).

    sampling    generators, reference           rollouts, evaluations
    training    trainer, SDPO teachers          steps, checkpoints, a restart of the trainer

Those who leave are asleep before the others wake, so that a GPU never holds both. The turn may
change at any time: requests of a sleeping generator wait, and continue later. A process that is
replaced comes up asleep, and gets its turn with the others of its pool.
"""

import asyncio
from typing import Any, Literal, Protocol

from composer_mesh.mesh.waiting import together
from composer_mesh.services.service import Service

SET_AWAKE = "set_awake"


class Turns(Protocol):
    """Gives the devices to one side; each call waits until that side has them."""

    async def train(self) -> None:
        """Let trainer and teachers have the devices."""

    async def sample(self) -> None:
        """Let generators and reference have the devices."""

    async def clear(self) -> None:
        """Take the devices from generators and reference, whether or not the trainer is alive."""


class NoTurns:
    """Turns of a run whose processes keep their devices."""

    async def train(self) -> None: ...

    async def sample(self) -> None: ...

    async def clear(self) -> None: ...


class SleepingTeachers(Protocol):
    """SDPO teachers in separate processes, implemented by `SdpoTeachers`."""

    async def set_awake(self, awake: bool) -> None: ...


class SleepingRanks(Protocol):
    """The trainer's processes, implemented by `TrainerRanks`."""

    async def on_all(self, endpoint: str, *args: Any) -> list[Any]: ...


class DeviceTurns:
    """The turns of one run. A call that fails or is cancelled leaves the turn to the next call."""

    def __init__(
        self, ranks: SleepingRanks, sampling: list[Service], training: asyncio.Event
    ) -> None:
        """`training` is set while teachers may take a device; none of them does by itself."""
        self._ranks, self._sampling, self._training = ranks, sampling, training
        self.teachers: SleepingTeachers | None = None
        self._turn: Literal["training", "sampling"] | None = None

    async def train(self) -> None:
        if self._turn == "training":
            return
        await self.clear()
        await self._ranks.on_all(SET_AWAKE, True)
        if self.teachers is not None:
            await self.teachers.set_awake(True)
        self._turn = "training"

    async def sample(self) -> None:
        if self._turn == "sampling":
            return
        self._turn = None
        if self.teachers is not None:
            await self.teachers.set_awake(False)
        self._training.clear()
        await self._ranks.on_all(SET_AWAKE, False)
        await self._set_sampling(True)
        self._turn = "sampling"

    async def clear(self) -> None:
        self._turn = None
        await self._set_sampling(False)
        self._training.set()

    async def _set_sampling(self, awake: bool) -> None:
        await together(*(pool.setup(SET_AWAKE, awake) for pool in self._sampling))
