"""The receiver of weights: fetches a version into staging memory, and can be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.configs.weights import WeightTransport
from composer_mesh.losses.distillation import ema_update_tensor
from composer_mesh.mesh.process_resources import own_gpus
from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.supervision import heard
from composer_mesh.mesh.weights.choice import open_receiver
from composer_mesh.mesh.weights.manifest import (
    PullAbandoned,
    RankPart,
    WeightManifest,
    WeightsHandle,
    WrongChecksum,
)
from composer_mesh.mesh.weights.transports import (
    PartShape,
    TransportReceiver,
    check_stamps,
    checksum,
    flat,
    unstamp,
)


@dataclass(frozen=True, eq=False)
class StagedWeights:
    """Weights in the receiver's own memory: one buffer per part of the handle.

    Valid until the receiver receives again; later use raises `TornWeights`.
    """

    handle: WeightsHandle
    memories: tuple[Tensor, ...]

    @property
    def version(self) -> int:
        """The version of these weights."""
        return self.handle.version

    @property
    def manifest(self) -> WeightManifest:
        """The manifest of the tensors."""
        return self.handle.manifest

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each complete tensor with all its names, in the publisher's order.

        A view of the staged memory if one rank had all rows, else a new tensor.
        """
        self._check()
        pieces: dict[int, list[tuple[int, Tensor]]] = {}
        for place, first, view in self._views():
            pieces.setdefault(place, []).append((first, view))
        for place, entry in enumerate(self.manifest.entries):
            views = [view for _, view in sorted(pieces.get(place, []), key=lambda one: one[0])]
            if not views:
                views = [torch.empty(entry.shape, dtype=entry.dtype)]
            yield entry.names, views[0] if len(views) == 1 else torch.cat(views)

    @torch.no_grad()
    def apply(self, model: nn.Module, rate: float = 1.0) -> None:
        """Interpolate a model's weights towards these, in place; `rate` 1 copies them.

        Rows are copied one rank after the other; no complete tensor is materialized.
        """
        self._check()
        places = self.manifest.places(model)
        for entry, first, rows in self._views():
            for place in places[entry]:
                target = place.narrow(0, first, rows.shape[0]) if place.dim() else place
                ema_update_tensor(target, rows, rate)

    def _views(self) -> Iterator[tuple[int, int, Tensor]]:
        for part, memory in zip(self.handle.parts, self.memories, strict=True):
            for piece, view in part.layout.views(self.manifest, memory):
                yield piece.entry, piece.first, view

    def _check(self) -> None:
        for part, memory in zip(self.handle.parts, self.memories, strict=True):
            check_stamps(memory, self.version, part.serial)


Memories = tuple[Tensor, ...]


class WeightReceiver:
    """Fetches weights into reused staging memory.

    A read from a dead process may fail only after minutes. Until then it owns the memory that it
    may write to, also after the caller was cancelled.
    """

    def __init__(
        self, open_receiver: Callable[[WeightTransport], TransportReceiver] = open_receiver
    ) -> None:
        self._open = open_receiver
        self._memories: Memories = ()
        self._receivers: dict[WeightTransport, TransportReceiver] = {}
        self._abandoned: asyncio.Future[None] | None = None

    async def receive(self, handle: WeightsHandle) -> StagedWeights:
        """Fetch one version from all its publishers concurrently; replaces what was staged before.

        One call at a time; `abandon` ends it with `PullAbandoned`. Raises `TornWeights` if the
        bytes are not all of that version, `WrongChecksum` if they are not as published, and
        `TransportUnavailable` or `PublisherGone` if they cannot be fetched here.
        """
        handle.check_whole()
        memories, self._memories = self._memories, ()
        sizes = [part.layout.nbytes for part in handle.parts]
        if [memory.numel() for memory in memories] != sizes:
            # Pinned if the process copies from it to a GPU.
            options: dict[str, Any] = {"dtype": torch.uint8, "pin_memory": bool(own_gpus())}
            memories = tuple(torch.empty(nbytes, **options) for nbytes in sizes)
        for memory in memories:
            unstamp(memory)
        await self._unless_abandoned(self._fetch(handle, memories), handle.version)
        for part, memory in zip(handle.parts, memories, strict=True):
            check_stamps(memory, handle.version, part.serial)
        await asyncio.to_thread(_prove, handle, memories)
        self._memories = memories
        return StagedWeights(handle, memories)

    def abandon(self) -> None:
        """Stop waiting for the version that is being received, if there is one."""
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    async def _fetch(self, handle: WeightsHandle, memories: Memories) -> None:
        used = {part.transport for part in handle.parts}
        for name in used:
            self._receivers[name] = self._receivers.get(name) or self._open(name)
            offers = [part.offer for part in handle.parts if part.transport == name]
            self._receivers[name].keep(offers)
        parts = zip(handle.parts, memories, strict=True)
        await asyncio.gather(*(self._fetch_part(handle, *one) for one in parts))

    async def _fetch_part(self, handle: WeightsHandle, part: RankPart, memory: Tensor) -> None:
        shape = PartShape(handle.manifest, part.layout, part.rank)
        await self._receivers[part.transport].fetch(part.offer, shape, memory)
        made_progress(f"version {handle.version} from rank {part.rank}")

    async def _unless_abandoned(self, work: Any, version: int) -> None:
        self._abandoned = asyncio.get_running_loop().create_future()
        reading = asyncio.ensure_future(work)
        reading.add_done_callback(heard)
        either: list[asyncio.Future[Any]] = [reading, self._abandoned]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise PullAbandoned(version)
        reading.result()


def _prove(handle: WeightsHandle, memories: Memories) -> None:
    for part, memory in zip(handle.parts, memories, strict=True):
        if part.checksums is None:
            continue
        views = part.layout.views(handle.manifest, memory)
        for (piece, view), published in zip(views, part.checksums, strict=True):
            if checksum(flat(view)) != published:
                name = handle.manifest.entries[piece.entry].names[0]
                raise WrongChecksum(name, part.rank, handle.version)
            made_progress(f"a checksum of version {handle.version}")
