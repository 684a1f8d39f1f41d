"""The transports of weights that use Monarch.

    rdma         registered memory that receivers read one-sidedly, from all ranks concurrently
    torchstore   the publisher's own torchstore, whose controller and volume run in its process

torchstore 0.1.2 is an optional extra, and is imported when first used. Its controller mixes
synchronous and asynchronous endpoints, which Monarch 0.7 refuses; ours has asynchronous ones only
(`torchstore_controller`). Its client sends stored data as messages.
"""

from __future__ import annotations

import os
import pickle
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import this_proc
from torch import Tensor

from composer_mesh.configs.installed import is_installed
from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.mesh.weights.transports import (
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


CHUNK_BYTES = 16 << 20
"""Bytes per key: torchstore sends a key as one message, of which several copies are made."""
REPAIR = (
    "pip install 'composer-mesh[torchstore]' && pip install --no-deps torchstore==0.1.2, as its "
    "metadata requires another torch; or choose another weights.transport"
)


@dataclass(frozen=True)
class TorchstoreOffer:
    """A slot and its pickled store, so that a process without torchstore can say so."""

    store: bytes
    slot: int


def why_no_torchstore() -> str | None:
    """Return why this process cannot use torchstore; None if it can."""
    missing = [one for one in ("torchstore", "pygtrie") if not is_installed(one)]
    return f"{missing[0]} is not installed" if missing else None


def require_torchstore() -> None:
    """Raise `TransportUnavailable` where torchstore is missing."""
    if (why := why_no_torchstore()) is not None:
        raise TransportUnavailable("torchstore", why, REPAIR)


class TorchstoreSender:
    """Two buffers, and a store that receives a copy of the published one."""

    def __init__(self, nbytes: int) -> None:
        require_torchstore()
        self._memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self._client: Any = None
        self._controller: Any = None
        self._store = b""

    def memory(self, slot: int) -> Tensor:
        return self._memories[slot]

    async def offer(self, slot: int) -> TorchstoreOffer:
        """Store the chunks. The stamp is cleared before them and set after them, as in memory."""
        if self._client is None:
            await self._open()
        memory, put = self._memories[slot], self._client.put
        await put(_mark_of(slot), torch.full((MARK_BYTES,), 255, dtype=torch.uint8))
        for key, chunk in _chunks(slot, memory):
            await put(key, chunk.clone())  # a view would be sent with all of its base tensor
            made_progress("a chunk of weights in the store")
        await put(_mark_of(slot), memory[:MARK_BYTES].clone())
        return TorchstoreOffer(self._store, slot)

    async def close(self) -> None:
        if self._client is not None:
            for key in await self._controller.keys.call_one():
                await self._client.delete(key)

    async def _open(self) -> None:
        _quiet()
        from torchstore.client import LocalClient
        from torchstore.storage_volume import StorageVolume
        from torchstore.strategy import SingletonStrategy

        from composer_mesh.mesh.weights.torchstore_controller import AsyncController

        strategy, here = SingletonStrategy(), this_proc()
        volume = await StorageVolume.spawn(1, here, id_func=strategy.get_volume_id)
        controller = here.spawn(f"torchstore_{secrets.token_hex(4)}", AsyncController)
        await controller.init.call_one(strategy, 1, volume)
        strategy = await controller.get_controller_strategy.call_one()
        self._client, self._controller = LocalClient(controller, strategy), controller
        self._store = pickle.dumps((controller, strategy))


class TorchstoreReceiver:
    """A client for each store that weights come from."""

    def __init__(self) -> None:
        require_torchstore()
        self._clients: dict[bytes, Any] = {}

    async def fetch(self, offer: TorchstoreOffer, _shape: PartShape, memory: Tensor) -> None:
        client = self._client(offer.store)
        for key, chunk in _chunks(offer.slot, memory):
            await client.get(key, chunk)
            made_progress("a chunk of weights from the store")
        await client.get(_mark_of(offer.slot), memory[:MARK_BYTES])

    def keep(self, offers: list[TorchstoreOffer]) -> None:
        stores = {offer.store for offer in offers}
        self._clients = {one: found for one, found in self._clients.items() if one in stores}

    def _client(self, store: bytes) -> Any:
        _quiet()
        from torchstore.client import LocalClient

        if store not in self._clients:
            self._clients[store] = LocalClient(*pickle.loads(store))
        return self._clients[store]


def _mark_of(slot: int) -> str:
    return f"{slot}-mark"


def _chunks(slot: int, memory: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"{slot}-{place}", one) for place, one in enumerate(memory.split(CHUNK_BYTES))]


def _quiet() -> None:
    """Set Monarch's own maximum message size before torchstore sets another one, with a warning."""
    os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(10 << 30))
