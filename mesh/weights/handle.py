"""Where one version of the weights can be read, and what has been read of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_mesh.mesh.transport import BufferHandle
from composer_mesh.mesh.weights.manifest import WeightManifest, identity
from composer_mesh.mesh.weights.marks import check_marks


@dataclass(frozen=True)
class WeightsHandle:
    """Where one version of the weights can be read."""

    version: int
    manifest: WeightManifest
    buffer: BufferHandle


@dataclass(frozen=True, eq=False)
class StagedWeights:
    """Weights that have arrived; good until the receiver receives again."""

    version: int
    manifest: WeightManifest
    memory: Tensor

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Each tensor, as it lies in the staged memory, with all its names."""
        check_marks(self.memory, self.version)
        for entry, tensor in self.manifest.tensors(self.memory):
            yield entry.names, tensor

    @torch.no_grad()
    def apply(self, model: nn.Module, rate: float = 1.0) -> None:
        """Move a model's weights to these, in place, by a share of the way: 1 copies them."""
        check_marks(self.memory, self.version)
        own = self.manifest.check(model)
        for entry, tensor in self.manifest.tensors(self.memory):
            for place in {identity(own[name]): own[name] for name in entry.names}.values():
                if rate == 1.0 or not place.is_floating_point():
                    place.copy_(tensor)
                else:
                    place.lerp_(tensor, rate)
