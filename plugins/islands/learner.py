"""The trainer's side of an island: its trained weights as flat vectors, on one or several ranks.

The first rank speaks with the other islands. Where weights are sharded, all ranks gather complete
ones for it in steps in which a round begins or ends, and take the result back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.optimizer_state import StoredOptimizerState
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import broadcast_into, is_dtensor, local, rows_of
from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.islands.rounds.island import Island, IslandPort, IslandWeights, schedules
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector
from composer_mesh.plugins.islands.rounds.torchft_rules import check_torchft


def open_island(config: IslandsConfig, steps: int, weights: IslandWeights) -> IslandPort:
    """Return the island of a run with `steps` optimizer steps.

    Raises `StoreUnfit` for an address that cannot be used, or a package that is missing.
    """
    if config.lighthouse is None:
        return Island(config, steps, weights)
    check_torchft(config)
    from composer_mesh.plugins.islands.rounds.managed_island import ManagedIsland

    return ManagedIsland(config, steps, weights)


class WholeWeights:
    """Complete copies of trained weights in float32, on the CPU; a port of islands."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.sizes = {name: shape.numel() for name, shape in shapes.items()}
        self.of: dict[str, Tensor] = {}
        self.written: set[str] = set()

    def read(self, names: Sequence[str]) -> Vector:
        flat = torch.cat([self.of[name].reshape(-1) for name in names])
        found: Vector = flat.numpy()
        return found

    def write(self, names: Sequence[str], values: Vector) -> None:
        sizes = [self.sizes[name] for name in names]
        for name, part in zip(names, torch.from_numpy(values).split(sizes), strict=True):
            self.of[name].copy_(part.view_as(self.of[name]))
            self.written.add(name)


class LearnerIsland:
    """The island of one trainer. Every method but `new_events` is collective over the ranks."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks
        self._whole = WholeWeights({name: one.shape for name, one in weights.items()})
        self._island: IslandPort | None = None
        if ranks.rank == 0:
            self._island = open_island(config.islands, config.run.steps, self._whole)
        self._schedules = schedules(config.islands, config.run.steps)

    def join(self) -> None:
        """Start from the newest common weights."""
        self._gather()
        if self._island is not None:
            self._island.join()
        self._scatter()

    def restore(self, step: int, kept: StoredOptimizerState) -> None:
        """Continue after the checkpoint of a step, with what it has `kept`."""
        self._gather()
        if self._island is not None:
            shapes = kept.shapes()
            tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
            kept.read(tensors)
            vectors: dict[str, Any] = {name: one.numpy() for name, one in tensors.items()}
            self._island.restore(step, vectors)
        self._scatter()

    def after_step(self, step: int) -> dict[str, float]:
        """Begin and end the rounds that are due; return the first rank's figures."""
        if not any(one.begins(step) or one.merges(step) for one in self._schedules):
            return {} if self._island is None else self._island.figures()
        self._gather()
        figures = {} if self._island is None else self._island.after_step(step)
        self._scatter()
        return figures

    def kept(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps for `restore`; only the first rank has something."""
        if self._island is None:
            return {}
        return {name: torch.from_numpy(one) for name, one in self._island.kept().items()}

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events since the last call: kind and text."""
        return [] if self._island is None else self._island.new_events()

    @torch.no_grad()
    def _gather(self) -> None:
        """Copy the complete weights to the first rank."""
        self._whole.written.clear()
        for name, weight in self._weights.items():
            whole: Tensor = weight.full_tensor() if is_dtensor(weight) else weight
            if self._island is not None:
                self._whole.of[name] = whole.detach().to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def _scatter(self) -> None:
        """Write the weights that the island has changed on the first rank to every rank."""
        (names, *_) = self._ranks.gather(sorted(self._whole.written))
        if self._ranks.size == 1:
            for name in names:
                weight = self._weights[name]
                local(weight).copy_(local(rows_of(self._whole.of[name], weight)))
            return
        broadcast_into({name: self._weights[name].detach() for name in names}, self._whole.of)
