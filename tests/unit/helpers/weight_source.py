"""A model's tensors that are told from those of other versions, and what came of them."""

from __future__ import annotations

from typing import Any

import torch

from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import StagedWeights


class Source:
    """A model's tensors, all of one number, and their publisher."""

    def __init__(self, transport: Transport, **options: Any) -> None:
        self.state = {"a": torch.zeros(300, 7), "b": torch.zeros(5, dtype=torch.int64)}
        self.publisher = WeightPublisher(lambda: self.state, transport=transport, **options)

    async def publish(self, version: int) -> WeightsHandle:
        for tensor in self.state.values():
            tensor.fill_(version)
        return await self.publisher.publish(version)


def numbers(staged: StagedWeights) -> set[float]:
    return {float(one) for _, tensor in staged.tensors() for one in tensor.unique()}
