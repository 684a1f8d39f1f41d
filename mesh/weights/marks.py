"""The version before and behind a flat run of weights: both equal, or the bytes are a mix."""

import torch
from torch import Tensor

from composer_mesh.mesh.weights.errors import TornWeights

NO_VERSION = -1


def _marks(memory: Tensor) -> tuple[Tensor, Tensor]:
    return memory[:8].view(torch.int64), memory[-8:].view(torch.int64)


def mark(memory: Tensor, version: int) -> None:
    for mark in _marks(memory):
        mark.fill_(version)


def check_marks(memory: Tensor, version: int) -> None:
    front, back = (int(mark.item()) for mark in _marks(memory))
    if not front == back == version:
        raise TornWeights(version, front, back)
