"""A small pool of registered buffers for teacher outputs, never overwritten while read.

A ticket holds a buffer until it is released. A new step reclaims all buffers of earlier steps,
whose readers are gone by then. So does `forget`, after which any step may come.
"""

import asyncio

from torch import Tensor

from composer_mesh.actors.teacher_outputs.messages import StepOver
from composer_mesh.mesh.transport import BufferHandle, SendBuffer


class SlotPool:
    """A fixed number of buffers, handed out by ticket; `acquire` waits while all are in use."""

    def __init__(self, count: int, capacity_bytes: int) -> None:
        self._buffers = [SendBuffer(capacity_bytes) for _ in range(count)]
        self._held: dict[int, int] = {}
        self._step, self._tickets, self._era = -1, 0, 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Number of buffers in use."""
        return len(self._held)

    async def acquire(self, step: int) -> int:
        """Return a ticket for a free buffer; waits. Raises `StepOver` once a later step began."""
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
        """Write data into the ticket's buffer; return None for a ticket of an ended step."""
        slot = self._held.get(ticket)
        return None if slot is None else await self._buffers[slot].write(data)

    async def forget(self) -> None:
        """Reclaim all buffers, also from waiting callers; there must be no readers left."""
        async with self._freed:
            self._step, self._held, self._era = -1, {}, self._era + 1
            self._freed.notify_all()

    async def release(self, ticket: int) -> None:
        """Release a buffer; does nothing for a ticket of an ended step."""
        async with self._freed:
            self._held.pop(ticket, None)
            self._freed.notify_all()
