"""The models that a generator samples from: the policy, and snapshots of clients' models.

A snapshot with adapters shares the policy's weights; one of all weights has its own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from composer_mesh.plugins.tinker.models.adapter_layers import AdapterLayout, adapted, shared_copy
from composer_mesh.plugins.tinker.models.model_state import StoredState, UnusableState, read_state

T = TypeVar("T")


@dataclass(frozen=True)
class SnapshotModels:
    """Two copies of one snapshot's model that share its weights: to sample with, and to score."""

    sampling: Any
    scoring: Any


class SnapshotReader:
    """Makes the models of snapshots from their files; the empty path is the policy itself."""

    def __init__(self, base: Any, alpha: float) -> None:
        self.base, self._alpha = base.requires_grad_(False), alpha

    def read(self, path: str) -> SnapshotModels:
        """Return a snapshot's models; raises `UnusableState`."""
        if not path:
            return SnapshotModels(shared_copy(self.base), shared_copy(self.base))
        stored = read_state(Path(path))
        if stored.spec.rank == 0:
            model = self._whole(path, stored)
            return SnapshotModels(model, shared_copy(model))
        return SnapshotModels(self._adapted(path, stored), self._adapted(path, stored))

    def _adapted(self, path: str, stored: StoredState) -> Any:
        layout = AdapterLayout.of(self.base, stored.spec)
        weights = next(self.base.parameters())
        flat = stored.tensors["weights"].to(weights.device, weights.dtype)
        if flat.shape != (layout.total,):
            raise UnusableState(path, "it is of another base model")
        model, active = adapted(self.base)
        active.use(layout.pairs(flat[None]), layout.rank, self._alpha)
        return model

    @torch.no_grad()
    def _whole(self, path: str, stored: StoredState) -> Any:
        model = copy.deepcopy(self.base)
        weights = list(model.parameters())
        flat = stored.tensors["weights"]
        if len(flat) != sum(one.numel() for one in weights):
            raise UnusableState(path, "it is of another base model")
        for one, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            one.copy_(part.view_as(one))
        return model


class LoadedSnapshots(Generic[T]):
    """What is held for the snapshots used last; those in use are never dropped."""

    def __init__(self, most: int, in_use: Callable[[T], bool]) -> None:
        self._most, self._in_use = most, in_use
        self._held: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[T]:
        """Return what is held for all snapshots."""
        return list(self._held.values())

    def get(self, path: str) -> T | None:
        """Return what is held for a snapshot, which becomes the last used; None without it."""
        if path in self._held:
            self._held.move_to_end(path)
        return self._held.get(path)

    def add(self, path: str, loaded: T) -> list[T]:
        """Hold a snapshot; return those to close in its place."""
        self._held[path] = loaded
        idle = [name for name, one in self._held.items() if name != path and not self._in_use(one)]
        dropped = idle[: max(0, len(self._held) - self._most)]
        return [self._held.pop(name) for name in dropped]
