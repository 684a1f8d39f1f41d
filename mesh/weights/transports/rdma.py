"""Weights in registered memory that receivers read one-sidedly, from all ranks concurrently."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.mesh.weights.transports.port import (
    MARK_BYTES,
    SLOTS,
    PartShape,
    TransportReceiver,
)


@dataclass(frozen=True)
class RdmaOffer:
    """The registered part, and its first bytes again, to be read after the rest."""

    whole: BufferHandle
    front: BufferHandle


class RdmaSender:
    """Two registered buffers."""

    def __init__(self, nbytes: int) -> None:
        self._buffers = [SendBuffer(nbytes) for _ in range(SLOTS)]

    def memory(self, slot: int) -> Tensor:
        return self._buffers[slot].bytes

    async def offer(self, slot: int) -> RdmaOffer:
        buffer = self._buffers[slot]
        return RdmaOffer(await buffer.whole(), await buffer.front())

    async def close(self) -> None:
        for buffer in self._buffers:
            await buffer.close()


class RdmaReceiver(TransportReceiver):
    """Reads registered memory; caches nothing."""

    async def fetch(self, offer: RdmaOffer, _shape: PartShape, memory: Tensor) -> None:
        await read(offer.whole, memory)
        front = await read(offer.front)
        memory[:MARK_BYTES].copy_(front[:MARK_BYTES])
