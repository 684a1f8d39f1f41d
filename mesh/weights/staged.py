"""One received version of the weights, to be applied to a model or read as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer_mesh.losses.teacher_weights import ema_update_tensor
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.mesh.weights.manifest import WeightManifest
from composer_mesh.mesh.weights.version_stamps import check_stamps


@dataclass(frozen=True, eq=False)
class StagedWeights:
    """Weights in the receiver's own memory: one buffer per part of the handle.

    Valid until the receiver receives again; later use raises `TornWeights`.
    """

    handle: WeightsHandle
    memories: tuple[Tensor, ...]

    @property
    def version(self) -> int:
        """The version of these weights."""
        return self.handle.version

    @property
    def manifest(self) -> WeightManifest:
        """The manifest of the tensors."""
        return self.handle.manifest

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each complete tensor with all its names, in the publisher's order.

        A view of the staged memory if one rank had all rows, else a new tensor.
        """
        self._check()
        pieces: dict[int, list[tuple[int, Tensor]]] = {}
        for place, first, view in self._views():
            pieces.setdefault(place, []).append((first, view))
        for place, entry in enumerate(self.manifest.entries):
            views = [view for _, view in sorted(pieces.get(place, []), key=lambda one: one[0])]
            if not views:
                views = [torch.empty(entry.shape, dtype=entry.dtype)]
            yield entry.names, views[0] if len(views) == 1 else torch.cat(views)

    @torch.no_grad()
    def apply(self, model: nn.Module, rate: float = 1.0) -> None:
        """Interpolate a model's weights towards these, in place; `rate` 1 copies them.

        Rows are copied one rank after the other; no complete tensor is materialized.
        """
        self._check()
        places = self.manifest.places(model)
        for entry, first, rows in self._views():
            for place in places[entry]:
                target = place.narrow(0, first, rows.shape[0]) if place.dim() else place
                ema_update_tensor(target, rows, rate)

    def _views(self) -> Iterator[tuple[int, int, Tensor]]:
        for part, memory in zip(self.handle.parts, self.memories, strict=True):
            for piece, view in part.layout.views(self.manifest, memory):
                yield piece.entry, piece.first, view

    def _check(self) -> None:
        for part, memory in zip(self.handle.parts, self.memories, strict=True):
            check_stamps(memory, self.version, part.serial)
