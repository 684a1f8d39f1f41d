"""The ranks of a trainer: each computes its share, and sums over all make one step of it.

Losses are divided by counts of the whole step, so sums are all there is to do. One rank alone has
nothing to sum and starts no process group. Sharding of parameters is not done here.
"""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Ranks:
    """This process's place among `size` ranks. Every method is called by all ranks together."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def connect(cls, rank: int, size: int, meeting: Path, deadline_s: float) -> "Ranks":
        """Join the others by a file that all of them see and nobody else does. Waits for all.

        A file, because torch's TCP store listens on every interface and asks nobody for a token.
        """
        timeout = timedelta(seconds=deadline_s)
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        return cls(rank, size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return any(self.gather(flag))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return [one for one in found if one is not None]

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank the sum of all gradients; a rank without one adds nothing."""
        if self.size == 1:
            return
        parameters = list(parameters)
        if not self.any(any(parameter.grad is not None for parameter in parameters)):
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._sum([parameter.grad for parameter in parameters if parameter.grad is not None])

    def _sum(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))
