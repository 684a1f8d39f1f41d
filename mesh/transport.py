"""Registered memory that other processes read one-sidedly, and the handles that are sent instead.

Uses ibverbs where the hardware has it, else TCP. The owner decides when a buffer may be rewritten:
a reader of a buffer that is being rewritten sees a mix.
"""

from __future__ import annotations

import asyncio
import functools
import math
import warnings
from dataclasses import dataclass
from typing import TypeAlias

import torch
from monarch._src.rdma.rdma import _make_local_memory_handle
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning, get_rdma_backend
from torch import Tensor

from composer_mesh.mesh.environment import without_noise
from composer_mesh.mesh.waiting import in_thread

Payload: TypeAlias = "Tensor | bytes | bytearray | memoryview"

SMALLEST_SPAN = 4096
READ_TIMEOUT_S = 120


class TransportError(RuntimeError):
    """The bytes and the memory for them do not fit."""


def transport_name() -> str:
    """Return how one-sided reads are transferred on this machine: `ibverbs` or `tcp`."""
    return get_rdma_backend()


@dataclass(frozen=True)
class BufferHandle:
    """Where bytes can be read, how many are valid, and their dtype and shape."""

    buffer: RDMABuffer | None
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SendBuffer:
    """A buffer of one owner, allocated and registered once and rewritten many times.

    A registered region can only be read completely, so a small payload is offered as a prefix of
    the memory whose length is a power of two; each such prefix is registered once.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, but must be at least 1")
        self.bytes = torch.zeros(capacity_bytes, dtype=torch.uint8)
        self._registered: dict[int, RDMABuffer] = {}
        self._lock = asyncio.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that fit without growing."""
        return self.bytes.numel()

    async def write(self, data: Payload) -> BufferHandle:
        """Copy data into the buffer; return its handle. Grows and re-registers if needed."""
        tensor = await in_thread(_as_tensor, data)
        async with self._lock:
            if tensor.nbytes > self.capacity_bytes:
                await self._grow(tensor.nbytes)
            await in_thread(self.bytes[: tensor.nbytes].copy_, _flat_bytes(tensor))
            buffer = await self._region(tensor.nbytes) if tensor.nbytes else None
        return BufferHandle(buffer, tensor.nbytes, tensor.dtype, tuple(tensor.shape))

    async def whole(self) -> BufferHandle:
        """Return a handle of the complete memory, for an owner that fills `bytes` itself."""
        async with self._lock:
            buffer = await self._region(self.capacity_bytes)
        return BufferHandle(buffer, self.capacity_bytes, torch.uint8, (self.capacity_bytes,))

    async def front(self) -> BufferHandle:
        """Return a handle of the first bytes of the memory, to read them separately."""
        async with self._lock:
            buffer = await self._region(1)
        return BufferHandle(buffer, buffer.size(), torch.uint8, (buffer.size(),))

    async def close(self) -> None:
        """Drop the registrations. Handles that are still held can no longer be read."""
        async with self._lock:
            await self._drop_all()

    async def _grow(self, nbytes: int) -> None:
        await self._drop_all()
        self.bytes = torch.zeros(_power_of_two(nbytes), dtype=torch.uint8)

    async def _region(self, nbytes: int) -> RDMABuffer:
        span = min(max(_power_of_two(nbytes), SMALLEST_SPAN), self.capacity_bytes)
        if span not in self._registered:
            self._registered[span] = await asyncio.to_thread(_register, self.bytes[:span])
        return self._registered[span]

    async def _drop_all(self) -> None:
        registered, self._registered = self._registered, {}
        for buffer in registered.values():
            await buffer.drop()


def _register(memory: Tensor) -> RDMABuffer:
    _load_native()
    with warnings.catch_warnings():
        # The transport is reported once per run; Monarch would warn in every process.
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        return RDMABuffer(memory)


@functools.cache
def _load_native() -> None:
    """Load the native library's drivers once, suppressing its messages about missing ones."""
    with without_noise():
        _make_local_memory_handle(torch.zeros(1, dtype=torch.uint8))


async def read(handle: BufferHandle, out: Tensor | None = None) -> Tensor:
    """Read what a handle points to, into `out` if given. Waits for the transfer.

    Without `out` the result is a view of new memory.
    """
    if out is not None:
        _check_fits(handle, out)
    if handle.buffer is None:
        return torch.empty(handle.shape, dtype=handle.dtype) if out is None else out
    _load_native()
    span = handle.buffer.size()
    if out is not None and span == handle.nbytes:
        await handle.buffer.read_into(_flat_bytes(out), timeout=READ_TIMEOUT_S)
        return out
    memory = torch.empty(span, dtype=torch.uint8)
    await handle.buffer.read_into(memory, timeout=READ_TIMEOUT_S)
    tensor = memory[: handle.nbytes].view(handle.dtype).view(handle.shape)
    return tensor if out is None else await in_thread(out.copy_, tensor)


def _check_fits(handle: BufferHandle, out: Tensor) -> None:
    if (out.dtype, tuple(out.shape)) != (handle.dtype, handle.shape):
        raise TransportError(
            f"the handle is {handle.dtype} of shape {handle.shape} ({handle.nbytes} bytes) but "
            f"out is {out.dtype} of shape {tuple(out.shape)} ({out.nbytes} bytes): "
            "allocate out from the handle's dtype and shape, or leave it out"
        )
    if not out.is_contiguous():
        raise TransportError(
            f"out has strides {out.stride()} but must be contiguous: pass out.contiguous()"
        )


def _as_tensor(data: Payload) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach().contiguous().cpu()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data is a {type(data).__name__}, but must be a tensor or bytes")
    view = bytearray(data)
    return torch.frombuffer(view, dtype=torch.uint8) if view else torch.empty(0, dtype=torch.uint8)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, math.ceil(math.log2(max(nbytes, 1))))
