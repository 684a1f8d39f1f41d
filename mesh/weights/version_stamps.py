"""Version stamps before and after a part: its version, and a unique serial number per publish.

The publisher clears them before it writes and sets them afterwards. A reader that reads a stamp
after everything else, and finds it set, has therefore read no concurrent writes.
"""

import torch
from torch import Tensor

from composer_mesh.mesh.weights.errors import TornWeights

NO_VERSION = -1
MARK_BYTES = 16


def _stamps(memory: Tensor) -> tuple[Tensor, Tensor]:
    return memory[:MARK_BYTES].view(torch.int64), memory[-MARK_BYTES:].view(torch.int64)


def stamp(memory: Tensor, version: int, serial: int) -> None:
    for place in _stamps(memory):
        place.copy_(torch.tensor([version, serial]))


def unstamp(memory: Tensor) -> None:
    for place in _stamps(memory):
        place.fill_(NO_VERSION)


def check_stamps(memory: Tensor, version: int, serial: int) -> None:
    front, back = (place.tolist() for place in _stamps(memory))
    if not front == back == [version, serial]:
        raise TornWeights(version, front[0], back[0])
