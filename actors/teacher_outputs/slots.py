"""Registered buffers that signals leave by: few, reused, and never written under a reader.

A ticket stands for a buffer until it is given back. A new step takes back all that the steps before
still held: their readers are gone when it begins. So does `forget`, after which any step may come.
Nothing here computes.
"""

import asyncio

from torch import Tensor

from composer_mesh.actors.teacher_outputs.messages import StepOver
from composer_mesh.mesh.transport import BufferHandle, SendBuffer


class SlotPool:
    """So many buffers, given out by ticket; whoever comes when all are out waits."""

    def __init__(self, count: int, capacity_bytes: int) -> None:
        self._buffers = [SendBuffer(capacity_bytes) for _ in range(count)]
        self._held: dict[int, int] = {}
        self._step, self._tickets, self._era = -1, 0, 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Buffers that are out."""
        return len(self._held)

    async def acquire(self, step: int) -> int:
        """A ticket for a free buffer. Waits for one; raises `StepOver` once a later step began."""
        async with self._freed:
            era = self._era
            if step > self._step:
                self._step, self._held = step, {}
                self._freed.notify_all()

            def over() -> bool:
                return step < self._step or era != self._era

            await self._freed.wait_for(lambda: over() or len(self._held) < len(self._buffers))
            if over():
                raise StepOver(step)
            slot = min(set(range(len(self._buffers))) - set(self._held.values()))
            self._tickets += 1
            self._held[self._tickets] = slot
            return self._tickets

    async def write(self, ticket: int, data: Tensor) -> BufferHandle | None:
        """Put data where readers find it; None for a ticket of a step that is over."""
        slot = self._held.get(ticket)
        return None if slot is None else await self._buffers[slot].write(data)

    async def forget(self) -> None:
        """Take everything back, also from those who wait: nobody reads any more."""
        async with self._freed:
            self._step, self._held, self._era = -1, {}, self._era + 1
            self._freed.notify_all()

    async def release(self, ticket: int) -> None:
        """Give a buffer back; nothing happens for a ticket of a step that is over."""
        async with self._freed:
            self._held.pop(ticket, None)
            self._freed.notify_all()
