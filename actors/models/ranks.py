"""The ranks of a trainer: each computes its share of a step; gradients are summed over all.

Ranks that divide the positions of their forwards, a context, compute one share together. Losses are
divided by counts of the complete step, so that sums suffice. A single rank has nothing to sum, and
needs a process group only if it shards its weights. `sharding` shards them.

Rendezvous of a trainer's ranks, and the network interface that they use.

    on the controller's machine   a file that only this user can read
    on another host               a TCP port of rank 0 on loopback
    on several hosts              a TCP port of rank 0, on its host's cluster address

Torch's TCP store requires no token, and messages between ranks are not encrypted. So it is bound to
that one address, and the network between the hosts of a run must be private.
"""

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_mesh.actors.models.expert_parallel import ContextGroup, ExpertGroup
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.hosts.address import IFNAMES, cluster_address, interface_of

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """The address of rank 0's port."""

    host: str
    port: int


Rendezvous = Path | Address


def open_store(deadline_s: float, apart: bool = True) -> tuple[Address, dist.Store]:
    """Listen for the other ranks on a free port, on the cluster address if `apart`, or loopback."""
    host = cluster_address() if apart else LOOPBACK
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Address(host, port), store


def join_store(rendezvous: Rendezvous, size: int, deadline_s: float) -> dist.Store:
    """Return the store in which `size` ranks find each other. Waits for rank 0's port."""
    timeout = timedelta(seconds=deadline_s)
    if isinstance(rendezvous, Address):
        return dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    store = dist.FileStore(str(rendezvous), size)
    store.set_timeout(timeout)
    return store


def choose_interfaces(
    rendezvous: Rendezvous, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Make gloo and NCCL use loopback, or the interface that other hosts can reach."""
    if isinstance(rendezvous, Address):
        near = ipaddress.ip_address(rendezvous.host).is_loopback
        name = interface_of(rendezvous.host if near else cluster_address(environ))
        environ.update(dict.fromkeys(IFNAMES, name))


T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
CPU = torch.device("cpu")
COLLECTIVE_S = 7 * 86_400.0
"""Longest wait of a rank for the others within its work; an owner ends ranks that stand still."""


@dataclass(frozen=True)
class Division:
    """How many ranks divide the positions of a forward, and how many a layer's experts."""

    context: int = 1
    experts: int = 1


WHOLE = Division()


class RanksLost(Worded, RuntimeError):
    """A rank failed where others wait for it, or lost another one: all have to be replaced."""

    failure_class: ClassVar[str] = "infrastructure"

    message = "rank {0} failed while others waited for it: {1}"


class FailedElsewhere(Worded, ValueError):
    """Work that this rank could do and another could not: its number, and why."""

    message = "{1} (on rank {0})"


class Ranks:
    """This process's rank among `size` ranks. Every method is collective: all ranks call it."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device = CPU) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.background_group: Any = None
        """Process group for work concurrent with steps, so that messages do not mix."""
        self.context: ContextGroup | None = None
        """Those of the ranks that divide the positions of each forward; None for only this one."""
        self.experts: ExpertGroup | None = None
        """Those of the ranks that divide the experts of each layer; None if each has all."""
        self._timeout: timedelta | None = None

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        deadline_s: float,
        device: torch.device = CPU,
        store: dist.Store | None = None,
        division: Division = WHOLE,
    ) -> "Ranks":
        """Join the process groups at the rendezvous. Waits for all ranks.

        Where the rendezvous is a port of this process, `store` is its server. No group can be
        formed later, as the rendezvous may be gone. `deadline_s` bounds the wait for the rendezvous
        alone: a collective waits for the slowest rank, whose owner watches its progress.
        """
        timeout = timedelta(seconds=COLLECTIVE_S)
        store = store or join_store(rendezvous, size, deadline_s)
        choose_interfaces(rendezvous)
        backend = BACKENDS[device.type]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        ranks = cls(rank, size, device)
        ranks.background_group = dist.new_group(backend=BACKENDS["cpu"], timeout=timeout)
        ranks._timeout = timeout
        ranks.divide(division)
        return ranks

    def divide(self, division: Division) -> None:
        """Form the groups of ranks that divide positions and experts. Needs the rendezvous."""
        self._divide_context(division.context)
        self._divide_experts(division.experts)

    def check_divided(self, division: Division) -> None:
        """Raise ValueError unless the ranks are divided like this."""
        found = Division(
            1 if self.context is None else self.context.size,
            1 if self.experts is None else self.experts.size,
        )
        if found != division:
            raise ValueError(
                f"ranks are divided as {found} but {division} is requested: connect so"
            )

    def _divide_context(self, size: int) -> None:
        """Let each `size` ranks in a row divide the positions of their forwards, from now on."""
        if size == 1:
            self.context = None
            return
        number = self.rank // size
        groups = [self._group(range(first, first + size)) for first in range(0, self.size, size)]
        self.context = ContextGroup(self.rank % size, size, groups[number])

    def _divide_experts(self, size: int) -> None:
        """Let `size` ranks divide the experts of each layer of mixtures, from now on."""
        if size == 1:
            self.experts = None
            return
        copies = self.size // size
        stored = [range(first, first + copies) for first in range(0, self.size, copies)]
        gather = [self._group(members) for members in stored] if copies > 1 else None
        dispatch = [self._group(range(one, self.size, copies)) for one in range(copies)]
        own = None if gather is None else gather[self.rank // copies]
        self.experts = ExpertGroup(size, copies, dispatch[self.rank % copies], own)

    def _group(self, members: Iterable[int]) -> Any:
        backend = BACKENDS[self.device.type]
        return dist.new_group(list(members), timeout=self._timeout, backend=backend)

    @property
    def shares(self) -> int:
        """Number of shares that a step is divided into: each is one rank's, or a context's."""
        return self.size if self.context is None else self.size // self.context.size

    @property
    def share(self) -> int:
        """The number of this rank's share."""
        return self.rank if self.context is None else self.rank // self.context.size

    @property
    def first_of_share(self) -> bool:
        """Whether this rank speaks for its share: of a context only one does."""
        return self.context is None or self.context.rank == 0

    def mesh(self) -> Any:
        """Return the ranks as torch's `DeviceMesh`; a single rank creates its own group for it."""
        if not dist.is_initialized():
            backend = BACKENDS[self.device.type]
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return dist.init_device_mesh(self.device.type, (self.size,))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return [one for one in found if one is not None]

    def agreed(self, work: Callable[[], T]) -> T:
        """Return what `work` gave if it succeeded on every rank; else raise on each of them.

        Raises the own error, or `FailedElsewhere`; `RanksLost` if the ranks do not answer each
        other. The work itself must not wait for other ranks.
        """
        if self.size == 1:
            return work()
        found, failed = list[T](), None
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001  raised below, once all ranks know
            failed = error
        with self.waiting_for_each_other():
            reasons = self.gather("" if failed is None else f"{type(failed).__name__}: {failed}")
        for rank, reason in enumerate(reasons):
            if reason:
                raise failed or FailedElsewhere(rank, reason)
        return found[0]

    @contextmanager
    def waiting_for_each_other(self) -> Iterator[None]:
        """Turn errors of what several ranks do together into `RanksLost`, as others may wait."""
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            raise RanksLost(self.rank, f"{type(error).__name__}: {error}") from error

    def any_of_share(self, flag: bool) -> bool:
        """Whether the flag is set on any rank of this share."""
        return flag if self.context is None else self.context.any(flag, self.device)

    def of_shares(self, value: T) -> list[T]:
        """Return the value of every share, in their order: of a context its first rank's."""
        return self.gather(value)[:: 1 if self.context is None else self.context.size]

    @torch.no_grad()
    def gather_tensors(self, own: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in order of ranks; all have one shape and dtype."""
        if self.size == 1:
            return [own]
        found = own.new_empty(self.size * own.numel())
        dist.all_gather_single(found, own.reshape(-1).contiguous())
        return list(found.view(self.size, *own.shape))

    @torch.no_grad()
    def ordered_sum(self, own: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added in the order of ranks.

        Its bits are the same on every rank, and do not depend on how a backend routes messages.
        Each rank adds one part of it, so that no rank holds the tensors of all.
        """
        if self.size == 1:
            return own
        each = -(-own.numel() // self.size)
        sent = torch.nn.functional.pad(own.reshape(-1), (0, self.size * each - own.numel()))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        total = received[:each].clone()
        for part in received.split(each)[1:]:
            total += part
        whole = torch.empty_like(sent)
        dist.all_gather_single(whole, total)
        return whole[: own.numel()].view_as(own)

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every rank's gradients by their sum; a rank without gradients adds zeros."""
        parameters = list(parameters)
        if self.size == 1 or not parameters:
            return
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
