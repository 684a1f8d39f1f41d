"""Memory of its device that a process gives up while others have their turn on it.

    release   contents to the host's memory, device memory freed      the process is asleep
    restore   device memory allocated, contents back, bit for bit     it is awake

Tensors stay the objects that they are, with all their views and holders: their storages are emptied
and filled again. Nothing may read them in between. On a CPU the same is done with the host's own
memory, so that all of it is tested there.
"""

import asyncio
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.optimizer_state import plain
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.device import pin
from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.waiting import in_thread

GB = 2**30
ASLEEP = "idle, asleep: others have their turn on the device"
"""What `describe` says of such a process."""
ALIGNED = 256
"""Bytes to which copies on the host are aligned."""
REPORT_S = 5.0
"""Seconds between two reports of a call that waits for the turn of its process."""


class DeviceTaken(Worded, RuntimeError):
    """A process cannot have its device memory back: GB that it needs, and GB that are free."""

    message = (
        "{0:.2f} GB are to be restored on the device but {1:.2f} GB of it are free: see which "
        "process still holds memory there, lower the memory of generators or trainer, or set "
        "placement.colocate to false"
    )


class Asleep(Worded, RuntimeError):
    """Work was requested of a process without its device memory: what."""

    message = "{0} was requested while the process is asleep: wake it by set_awake first"


@dataclass
class _Part:
    """A storage and its bytes; `host` is their copy, which is `current` while they are the same."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: bool
    constant: bool
    host: Tensor | None = None
    current: bool = False


class DeviceMemory:
    """The storages of a process's tensors, on one device or on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._parts: dict[int, _Part] = {}
        self.released = False

    def check(self, work: str) -> None:
        """Raise `Asleep` where the device memory is released."""
        if self.released:
            raise Asleep(work)

    @torch.no_grad()
    def release(
        self,
        changing: Iterable[Tensor],
        constant: Iterable[Tensor] = (),
        replaced: Iterable[Tensor] = (),
    ) -> None:
        """Free the device memory of tensors; tensors elsewhere, and those listed before, are left.

        `constant` ones are copied once, as their bytes never change. Those that will be `replaced`
        are not copied: after `restore` they hold anything. Waits for all work of the device. Pinned
        memory is kept for the next time, as pinning takes longer than copying.
        """
        before, self._parts = self._parts, {}
        for tensors, kept, same in (
            (changing, True, False),
            (constant, True, True),
            (replaced, False, False),
        ):
            for one in (part for tensor in tensors for part in plain(tensor)):
                if one.device.type == self._device.type:
                    self._list(one, kept, same, before)
        if self._on_gpu:
            new = [part for part in self._parts.values() if part.kept and part.host is None]
            for part, host in zip(new, slices([part.nbytes for part in new], pin), strict=True):
                part.host = host
        for part in self._parts.values():
            self._copy(part)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            for part in self._parts.values():
                part.storage.resize_(0)
            torch.cuda.empty_cache()  # to the driver, so that another process can have it
        self.released = True

    def _list(self, one: Tensor, kept: bool, constant: bool, before: dict[int, _Part]) -> None:
        storage = _own_storage(one)
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._parts or not nbytes:
            return
        part = self._parts[key] = _Part(storage, nbytes, kept, constant)
        known = before.get(key)
        if known is not None and known.nbytes == nbytes:
            part.host, part.current = known.host, known.current and known.constant and constant

    def _copy(self, part: _Part) -> None:
        """Begin to copy a storage; on a CPU also free it, so that only one is there twice."""
        if part.kept and not part.current:
            if part.host is None:
                part.host = torch.empty(part.nbytes, dtype=torch.uint8)
            part.host.copy_(_bytes(part.storage), non_blocking=True)
            part.current = True
        if not self._on_gpu:
            part.storage.resize_(0)
        made_progress("a tensor to the host")

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the released memory again and fill it. Waits until all is there.

        Raises `DeviceTaken` where the device has too little free memory.
        """
        if not self.released:
            return
        try:
            for part in self._parts.values():
                part.storage.resize_(part.nbytes)
                if part.kept and part.host is not None:
                    _bytes(part.storage).copy_(part.host, non_blocking=True)
                if not self._on_gpu:
                    part.host, part.current = None, False
                made_progress("a tensor to the device")
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            needed = sum(part.nbytes for part in self._parts.values())
            free, _ = torch.cuda.mem_get_info(self._device)
            raise DeviceTaken(needed / GB, free / GB) from error
        self.released = False


def slices(sizes: Sequence[int], prepare: Callable[[Tensor], object]) -> list[Tensor]:
    """Return memory of these sizes in bytes, cut from one block that `prepare` is called with.

    The block has pages of its own, since two that are pinned may not share one.
    """
    begins = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
    if not begins[-1]:
        return []
    pages = mmap.mmap(-1, begins[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    prepare(block)
    return [block[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def _own_storage(one: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage, first a copy of it where it is pages of a file."""
    if not one.untyped_storage().resizable():
        one.data = one.detach().clone()
    return one.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class DeviceTurn:
    """Lets an actor use its device for one piece of work at a time, while it is awake.

    `async with turn:` waits for the work before it, and as long as the actor is asleep. Such a wait
    counts as progress: the turn of others may take long.
    """

    def __init__(self, awake: bool = True) -> None:
        self._one, self._awake = asyncio.Lock(), asyncio.Event()
        if awake:
            self._awake.set()

    async def __aenter__(self) -> None:
        while True:
            await its_turn(self._awake)
            await self._one.acquire()
            if self._awake.is_set():
                return
            self._one.release()

    async def __aexit__(self, *_: object) -> None:
        self._one.release()

    async def set_awake(self, awake: bool, change: Callable[[], Any]) -> None:
        """Change the state by `change`, in a thread, if it differs. Waits for running work."""
        async with self._one:
            if awake == self._awake.is_set():
                return
            await in_thread(change)
            if awake:
                self._awake.set()
            else:
                self._awake.clear()


async def its_turn(awake: asyncio.Event) -> None:
    """Wait until a process is awake; reports progress meanwhile."""
    while not awake.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await awake.wait()
        made_progress("the turn of others on the device")
