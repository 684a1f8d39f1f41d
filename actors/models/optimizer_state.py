"""Optimizer state, keyed by the names of the weights.

Learning rates and other hyperparameters come from the config and are not stored.

Optimizer state in the host's memory, which visits the device for each optimizer's update.

    host:    state of 1 | state of 2 | state of 3 ...
    device:  fetch 1, [update 1, fetch 2], [store 1, update 2, fetch 3] ...

The state of two optimizers at most is on the device. With CUDA the host's memory is pinned, and
copies run during updates on a stream of their own. Updates compute what they would without.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from composer_mesh.actors.models.sharding import from_rows, local
from composer_mesh.configs.worded import Worded

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
                for state, key, host in state_tensors(optimizer)
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
            for state, key, device in list(state_tensors(optimizer)):
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
            for state, key, host in list(state_tensors(optimizer)):
                state[key] = mapped(host, Tensor.pin_memory)

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()


def state_tensors(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Yield the tensors of an optimizer's state that can be moved, and where they are."""
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
    return transform_subclass(
        tensor, lambda _, part: mapped(part, make) if isinstance(part, Tensor) else part
    )


OF_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Entries with the shape of their weight; others have the shape that was stored."""


class StoredOptimizerState(Protocol):
    """Stored optimizer state: the shapes of complete tensors, and a method to read into tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, tensors: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class StoredForm(Protocol):
    """An optimizer whose state is stored in another form than it has in memory."""

    def begin(self, weight: nn.Parameter, device: torch.device) -> None:
        """Give a weight the state from before its first update, on a device."""

    def stored(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return a weight's state as plain tensors, which share its memory."""


class StateOfOtherWeights(Worded, ValueError):
    """Stored state belongs to other weights than those that are trained."""

    message = (
        "{0} is only {1}: continue with the policy and the trainer.lora that the run began with"
    )


class UnsupportedState(Worded, ValueError):
    """An optimizer with state that checkpoints cannot store."""

    message = (
        "the optimizer {0} keeps {1!r} as a {2}, but checkpoints store tensors: keep it as a "
        "tensor, or use another optimizer"
    )


def optimizer_state_of(
    weights: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return the optimizers' state of each weight, as `name/key`; shares its memory.

    Raises `UnsupportedState` for state that is no tensor.
    """
    found: dict[str, Tensor] = {}
    for name, one in weights.items():
        for optimizer in optimizers:
            if isinstance(optimizer, StoredForm):
                found |= {f"{name}/{key}": value for key, value in optimizer.stored(one).items()}
                continue
            for key, value in optimizer.state.get(one, {}).items():
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise UnsupportedState(type(optimizer).__name__, key, kind)
                found[f"{name}/{key}"] = value
    return found


def check_weights(weights: Iterable[str], others: Iterable[str]) -> None:
    """Raise `StateOfOtherWeights` where the names in a checkpoint, `others`, differ."""
    own, theirs = set(weights), set(others)
    for name in sorted(own ^ theirs):
        raise StateOfOtherWeights(name, "in the checkpoint" if name in theirs else "in the model")


@torch.no_grad()
def restore_optimizer_state(
    weights: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    kept: StoredOptimizerState,
    device: torch.device | None = None,
) -> None:
    """Restore the optimizers' state of their weights; each rank reads its rows.

    On the device of the weights, unless another is given.
    """
    found: dict[str, Tensor] = {}
    fused = {
        id(one)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
        if group.get("fused")  # counts its steps on the device
    }
    holders = {
        id(one): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }
    for place, shape in kept.shapes().items():
        if place in found:
            continue
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise StateOfOtherWeights(name, "in the checkpoint")
        weight = weights[name]
        optimizer = holders[id(weight)]
        if isinstance(optimizer, StoredForm):
            optimizer.begin(weight, device or weight.device)
            found |= {f"{name}/{key}": one for key, one in optimizer.stored(weight).items()}
            continue
        like = torch.zeros(shape, device=weight.device if id(weight) in fused else CPU)
        if key in OF_WEIGHT:
            rows = torch.zeros_like(local(weight.detach()), device=device)
            like = from_rows(rows, weight, weight.shape)
        found[place] = optimizer.state[weight][key] = like
    kept.read(found)
