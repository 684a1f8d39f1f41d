"""The side that offers weights.

Two registered buffers are written in turn. A buffer holds the version, then the tensors, then the
version again; the publisher invalidates both marks before it touches the tensors. Who publishes or
pulls when is decided elsewhere: nothing here waits for a receiver.

    | version | tensor | tensor | ... | version |      (one flat run of bytes)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer_mesh.mesh.transport import SendBuffer
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.mesh.weights.manifest import WeightManifest
from composer_mesh.mesh.weights.marks import NO_VERSION, mark


class WeightPublisher:
    """Offers the weights of one model, a version at a time."""

    def __init__(self, model: nn.Module, manifest: WeightManifest | None = None) -> None:
        self.manifest = manifest or WeightManifest.of(model)
        self.manifest.check(model)
        self._model = model
        self._buffers = (SendBuffer(self.manifest.nbytes), SendBuffer(self.manifest.nbytes))
        self._next = 0

    async def publish(self, version: int) -> WeightsHandle:
        """Copy the weights into the buffer that was not handed out last. Waits for no reader."""
        if version < 0:
            raise ValueError(f"version is {version}, but must be at least 0")
        buffer = self._buffers[self._next]
        mark(buffer.bytes, NO_VERSION)
        self._copy_to(buffer.bytes)
        mark(buffer.bytes, version)
        self._next = 1 - self._next
        return WeightsHandle(version, self.manifest, await buffer.whole())

    async def close(self) -> None:
        """Give both buffers back."""
        for buffer in self._buffers:
            await buffer.close()

    @torch.no_grad()
    def _copy_to(self, memory: Tensor) -> None:
        own = self._model.state_dict()
        for entry, place in self.manifest.tensors(memory):
            place.copy_(own[entry.names[0]])
