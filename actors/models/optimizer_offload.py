"""Optimizer state in the host's memory, which visits the device for each optimizer's update.

    host:    state of 1 | state of 2 | state of 3 ...
    device:  fetch 1, [update 1, fetch 2], [store 1, update 2, fetch 3] ...

The state of two optimizers at most is on the device. With CUDA the host's memory is pinned, and
copies run beside updates on a stream of their own. Updates compute what they would without.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Copy:
    """A tensor of the state in the host's memory, and its copy on the device."""

    state: MutableMapping[str, Any]
    key: str
    host: Tensor
    device: Tensor


@dataclass(frozen=True)
class Fetched:
    """The state of an optimizer on the device, complete after an event of the copies' stream."""

    copies: list[Copy]
    done: Any


class OffloadedOptimizers:
    """Optimizers whose state is on the device only during their own update.

    Numbers of no dimension, such as counts of steps, stay where the optimizer has them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = list(optimizers), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights; on return the state is in the host's memory again."""
        stored = None
        ahead = self._fetch(self._optimizers[0])
        for at, optimizer in enumerate(self._optimizers):
            here = ahead
            if stored is not None:
                stored.synchronize()  # only then is its memory on the device free again
            if at + 1 < len(self._optimizers):
                ahead = self._fetch(self._optimizers[at + 1])
            self._put(here)
            optimizer.step()
            stored = self._store(optimizer, here)
        if stored is not None:
            stored.synchronize()

    def _fetch(self, optimizer: torch.optim.Optimizer) -> Fetched:
        """Begin to copy an optimizer's state to the device."""
        with self._copying():
            copies = [
                Copy(state, key, host, mapped(host, self._to_device))
                for state, key, host in _tensors(optimizer)
            ]
            return Fetched(copies, self._event())

    def _to_device(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True, copy=True)

    def _put(self, fetched: Fetched) -> None:
        """Let an optimizer have the fetched state."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(fetched.done)
            for copy in fetched.copies:
                for one in plain(copy.device):
                    one.record_stream(current)
        for copy in fetched.copies:
            copy.state[copy.key] = copy.device

    def _store(self, optimizer: torch.optim.Optimizer, fetched: Fetched) -> Any:
        """Begin to copy an optimizer's state to the host; return the event of its end, with CUDA.

        State of a first update gets its memory there now.
        """
        hosts = {(id(copy.state), copy.key): copy.host for copy in fetched.copies}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._copying():
            for state, key, device in list(_tensors(optimizer)):
                host = hosts.get((id(state), key))
                if host is None:
                    host = mapped(device, self.empty_on_host)
                for to, source in zip(plain(host), plain(device), strict=True):
                    to.copy_(source, non_blocking=True)
                    if self._stream is not None:
                        source.record_stream(self._stream)
                state[key] = host
            return self._event()

    def empty_on_host(self, like: Tensor) -> Tensor:
        """Return a plain tensor in the host's memory, which is pinned if the device uses CUDA."""
        return torch.empty_like(like, device=CPU, pin_memory=self._stream is not None)

    def pin(self) -> None:
        """Move state that was restored into pinned memory, if the device uses CUDA."""
        if self._stream is None:
            return
        for optimizer in self._optimizers:
            for state, key, host in list(_tensors(optimizer)):
                state[key] = mapped(host, Tensor.pin_memory)

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()


def _tensors(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Yield the tensors of an optimizer's state that are offloaded, and where they are."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                yield state, key, value


def plain(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of: this rank's rows, codes and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [one for part in inner if isinstance(part, Tensor) for one in plain(part)]


def mapped(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same kind, made of other plain tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return make(tensor)
    found: Tensor = transform_subclass(
        tensor, lambda _, part: mapped(part, make) if isinstance(part, Tensor) else part
    )
    return found
