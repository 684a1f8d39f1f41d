"""A checksum that is as fast as memory: it finds bytes that changed, were lost or changed places.

Sums of 64-bit words, row by row, and a sum of those weighted by their place, all modulo 2**64. One
wrong word always shows; rows in another order too. It guards against faults, not against malice.
"""

import torch
from torch import Tensor

ROW = 512
"""Words of a row: 4 KiB, less than anything that moves by itself."""
REST = 0x9E3779B1
"""Odd, and large: what follows the last row is not taken for one."""


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(memory: Tensor) -> int:
    """Of a flat run of bytes, uint8 [n]; a signed 64-bit number."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    full = words.numel() // ROW * ROW
    rows = words[:full].view(-1, ROW).sum(1)
    odd = torch.arange(1, 2 * rows.numel() + 1, 2)  # invertible: no change of a row is lost
    rest = torch.cat([words[full:], memory[whole:].long()])
    places = torch.arange(1, 2 * rest.numel() + 1, 2)
    return int(((rows * odd).sum() + (rest * places).sum() * REST).item())
