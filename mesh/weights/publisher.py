"""The publisher of weights: one rank's side.

Two buffers are written in turn, so that the previous version stays intact. Never waits for a
receiver. The transport moves the bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from composer_mesh.mesh.device import pin, unpin
from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.supervision import heard
from composer_mesh.mesh.weights.choice import Transport, open_sender
from composer_mesh.mesh.weights.manifest import (
    PieceLayout,
    RankPart,
    WeightsHandle,
    WeightsMismatch,
    manifest_of,
    own_rows,
)
from composer_mesh.mesh.weights.transports import (
    SLOTS,
    PartShape,
    TransportSender,
    checksum,
    flat,
    stamp,
    unstamp,
)

State = Callable[[], Mapping[str, Tensor]]


class WeightPublisher:
    """Publishes the weights of one model, one version at a time.

    `state` returns the model's tensors, on every rank in the same order. A plain tensor is
    published by rank 0, a row-sharded `DTensor` by each rank that has rows. Floating tensors are
    published as `dtype` where given. With `checksums`, receivers verify every byte.
    """

    def __init__(
        self,
        state: State,
        *,
        transport: Transport,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        ranks: int = 1,
        checksums: bool = False,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank} of {ranks} ranks, but must be in 0 to {ranks - 1}")
        self._state, self._transport, self._dtype = state, transport, dtype
        self._rank, self._checksums = rank, checksums
        self._shape: PartShape | None = None
        self._sender: TransportSender | None = None
        self._pinned: list[Tensor] = []
        self._next = 0
        self._one = asyncio.Lock()

    async def publish(self, version: int) -> WeightsHandle:
        """Publish this rank's part of a version, in the buffer that was not published last.

        Waits for the copy, which runs in a thread and continues if the caller is cancelled, but not
        for any reader.
        """
        if version < 0:
            raise ValueError(f"version is {version}, but must be at least 0")
        publishing = asyncio.ensure_future(self._publish(version))
        publishing.add_done_callback(heard)
        return await asyncio.shield(publishing)

    async def close(self) -> None:
        """Free the buffers. Handles that are still held can no longer be fetched."""
        async with self._one:
            while self._pinned:
                unpin(self._pinned.pop())
            sender, self._sender, self._shape = self._sender, None, None
            if sender is not None:
                await sender.close()

    async def _publish(self, version: int) -> WeightsHandle:
        async with self._one:
            serial, slot = secrets.randbits(62), self._next
            shape, checksums = await asyncio.to_thread(self._write, version, serial, slot)
            parts: tuple[RankPart, ...] = ()
            if self._sender is not None:
                self._next = (slot + 1) % SLOTS
                offer = await self._sender.offer(slot)
                transport = self._transport.name
                parts = (RankPart(self._rank, transport, shape.layout, serial, offer, checksums),)
            return WeightsHandle(version, shape.manifest, parts)

    @torch.no_grad()
    def _write(
        self, version: int, serial: int, slot: int
    ) -> tuple[PartShape, tuple[int, ...] | None]:
        rows = own_rows(self._state(), self._rank, self._dtype)
        shape = self._same(PartShape(manifest_of(rows), PieceLayout.of(rows), self._rank))
        if not shape.layout.pieces:
            return shape, None
        on_gpu = any(one.local.is_cuda for one in rows)
        if self._sender is None:
            self._sender = self._open(shape, on_gpu)
        memory = self._sender.memory(slot)
        unstamp(memory)
        views = list(shape.layout.views(shape.manifest, memory))
        copies = [(place, rows[piece.entry].local) for piece, place in views]
        if on_gpu:
            _copy_from_gpu(copies)
        else:
            for number, (place, local) in enumerate(copies, start=1):
                place.copy_(local)
                made_progress(f"tensor {number} of {len(copies)} of version {version} to publish")
        made_progress(f"the copy of version {version} to publish")
        found = tuple(checksum(flat(place)) for _, place in views) if self._checksums else None
        stamp(memory, version, serial)
        return shape, found

    def _open(self, shape: PartShape, on_gpu: bool) -> TransportSender:
        sender = open_sender(self._transport, shape)
        if on_gpu:
            for slot in range(SLOTS):
                pin(sender.memory(slot))
                self._pinned.append(sender.memory(slot))
        return sender

    def _same(self, shape: PartShape) -> PartShape:
        """Check that the shape is that of all versions, which receivers have allocated."""
        if self._shape not in (None, shape):
            raise WeightsMismatch(
                "the tensors to publish are not those of the version before: "
                "make a new publisher for another model"
            )
        self._shape = shape
        return shape


def _copy_from_gpu(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to pinned memory after the work that is queued now. Waits for the copies only.

    They have a stream of their own: a step queued concurrently neither waits nor is awaited.
    """
    device = next(local.device for _, local in copies if local.is_cuda)
    ready = torch.cuda.current_stream(device).record_event()
    own = torch.cuda.Stream(device)
    with torch.cuda.stream(own):
        own.wait_event(ready)
        for place, local in copies:
            place.copy_(local, non_blocking=True)
        done = own.record_event()
    done.synchronize()
