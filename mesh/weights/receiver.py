"""The side that takes weights over: waits for a transfer, and gives it up when told."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from composer_mesh.mesh.transport import read
from composer_mesh.mesh.weights.errors import PullAbandoned
from composer_mesh.mesh.weights.handle import StagedWeights, WeightsHandle
from composer_mesh.mesh.weights.marks import NO_VERSION, check_marks, mark


class WeightReceiver:
    """Fetches weights into one staging buffer that is used again and again.

    A read from a process that is gone ends after minutes only. Until then the memory that it may
    write to belongs to it, also when nobody waits for it any more.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._abandoned: asyncio.Future[None] | None = None

    async def receive(self, handle: WeightsHandle) -> StagedWeights:
        """Read one version. Waits for the transfer; what was staged before is gone.

        One call at a time; `abandon` ends it with `PullAbandoned`.
        """
        memory, self._memory = self._memory, None
        if memory is None or memory.numel() != handle.manifest.nbytes:
            memory = torch.empty(handle.manifest.nbytes, dtype=torch.uint8)
        mark(memory, NO_VERSION)
        await self._read(handle, memory)
        check_marks(memory, handle.version)
        self._memory = memory
        return StagedWeights(handle.version, handle.manifest, memory)

    def abandon(self) -> None:
        """Wait no longer for a version that is on its way, if one is."""
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    async def _read(self, handle: WeightsHandle, memory: Tensor) -> None:
        self._abandoned = asyncio.get_running_loop().create_future()
        reading = asyncio.ensure_future(read(handle.buffer, memory))
        reading.add_done_callback(_heard)
        either: list[asyncio.Future[Any]] = [reading, self._abandoned]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise PullAbandoned(handle.version)
        reading.result()


def _heard(reading: asyncio.Future[Any]) -> None:
    if not reading.cancelled():
        reading.exception()
