"""Actors that move tensors."""

from __future__ import annotations

from typing import Any

import torch
from monarch.actor import concurrent_endpoint
from torch import nn

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver


class BytesActor(MeshActor):
    """Offers tensors and reads the ones of others."""

    kind = "bytes"

    def __init__(self, capacity: int = 64) -> None:
        self.buffer = SendBuffer(capacity)

    @concurrent_endpoint
    async def offer(self, tensor: torch.Tensor) -> BufferHandle:
        return await self.buffer.write(tensor)

    @concurrent_endpoint
    async def fetch(self, handle: BufferHandle, out: torch.Tensor | None = None) -> torch.Tensor:
        return await read(handle, out)

    @concurrent_endpoint
    async def registrations(self) -> int:
        return len(self.buffer._registered)


class TiedModel(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.middle = nn.Linear(width, width, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight


class WeightsActor(MeshActor):
    """Publishes or receives the weights of a small tied model."""

    kind = "weights"

    def __init__(self, width: int = 8) -> None:
        self.model = TiedModel(width)
        self.publishers: dict[str, WeightPublisher] = {}
        self.receiver = WeightReceiver()

    @concurrent_endpoint
    async def publish(
        self, version: int, value: float, transport: Transport | None = None
    ) -> WeightsHandle:
        """A version whose numbers are all `value`."""
        for parameter in self.model.parameters():
            parameter.data.fill_(value)
        transport = transport or Transport("rdma")
        if transport.name not in self.publishers:
            self.publishers[transport.name] = WeightPublisher(
                self.model.state_dict, transport=transport, checksums=True
            )
        return await self.publishers[transport.name].publish(version)

    @concurrent_endpoint
    async def pull(self, handle: WeightsHandle) -> dict[str, Any]:
        """Take a version over; returns the numbers that each tensor has then."""
        staged = await self.receiver.receive(handle)
        staged.apply(self.model)
        self.policy_version = staged.version
        return {name: tensor.unique().tolist() for name, tensor in self.model.state_dict().items()}

    @concurrent_endpoint
    async def tied(self) -> bool:
        return self.model.head.weight is self.model.embed.weight

    @concurrent_endpoint
    async def close(self) -> None:
        """Give back what was offered."""
        for publisher in self.publishers.values():
            await publisher.close()
