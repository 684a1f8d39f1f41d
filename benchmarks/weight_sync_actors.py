"""The two actors of `weight_sync.py`: a publisher and a receiver of weights.

Times inside a process are measured here.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.mesh.weights.transports import checksum

TENSORS = 20
KEY = "weights"


def some_state(nbytes: int) -> dict[str, Tensor]:
    """Make float32 tensors of `nbytes` bytes in all, like the layers of a model."""
    rows = max(1, nbytes // TENSORS // 4096)
    return {f"layers.{place}.weight": torch.randn(rows, 1024) for place in range(TENSORS)}


def use_async_controller() -> None:
    """Replace torchstore's controller by one that Monarch 0.7 accepts."""
    import torchstore.api

    from composer_mesh.mesh.weights.torchstore_controller import AsyncController

    torchstore.api.Controller = AsyncController


class Source(MeshActor):
    """Holds the weights, and publishes them with every method."""

    kind: ClassVar[str] = "source"

    @concurrent_endpoint
    async def load(self, nbytes: int) -> int:
        """Make the weights; return their size in bytes."""
        self._state = some_state(nbytes)
        self._publishers: dict[str, WeightPublisher] = {}
        return sum(tensor.nbytes for tensor in self._state.values())

    @concurrent_endpoint
    async def publish(self, way: str, transport: Transport, version: int) -> WeightsHandle:
        """Publish the weights by a transport; methods with checksums are named so."""
        if way not in self._publishers:
            self._publishers[way] = WeightPublisher(
                lambda: self._state, transport=transport, checksums=way.endswith("checksums")
            )
        return await self._publishers[way].publish(version)

    @concurrent_endpoint
    async def put(self) -> None:
        """Store the weights with torchstore's own function."""
        import torchstore

        use_async_controller()
        await torchstore.put_state_dict(self._state, KEY)

    @concurrent_endpoint
    async def close(self) -> None:
        """Free what was published."""
        for publisher in self._publishers.values():
            await publisher.close()
        self._publishers.clear()


class Target(MeshActor):
    """Receives weights, and drops them."""

    kind: ClassVar[str] = "target"

    @concurrent_endpoint
    async def load(self, nbytes: int) -> None:
        """Allocate memory to copy into."""
        self._one, self._other = torch.ones(2, nbytes // 4)
        self._receivers: dict[str, WeightReceiver] = {}

    @concurrent_endpoint
    async def pull(self, way: str, handle: WeightsHandle) -> int:
        """Receive a version; return it."""
        receiver = self._receivers.setdefault(way, WeightReceiver())
        return (await receiver.receive(handle)).version

    @concurrent_endpoint
    async def get(self) -> int:
        """Load the weights with torchstore's own function; return the number of tensors."""
        import torchstore

        use_async_controller()
        found: dict[str, Any] = await torchstore.get_state_dict(KEY)
        return len(found)

    @concurrent_endpoint
    async def memcpy(self) -> float:
        """Return the seconds of a memcpy of the same bytes in this process."""
        return _timed(lambda: self._other.copy_(self._one))

    @concurrent_endpoint
    async def compare(self) -> float:
        """Return the seconds that detecting unchanged tensors takes."""
        self._other.copy_(self._one)
        return _timed(lambda: torch.equal(self._one, self._other))

    @concurrent_endpoint
    async def prove(self) -> float:
        """Return the seconds that a checksum of the same bytes takes."""
        return _timed(lambda: checksum(self._one.view(torch.uint8)))

    @concurrent_endpoint
    async def forget(self) -> None:
        """Free the staging memory."""
        self._receivers.clear()


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
