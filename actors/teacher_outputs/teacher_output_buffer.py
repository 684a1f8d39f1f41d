"""Buffer of teacher outputs between the event loop and the training thread.

Deliveries arrive on the event loop and wait while they are too far ahead; the training thread takes
them in order and blocks for missing ones.
"""

import asyncio
import concurrent.futures
from typing import TypeAlias

import torch
from torch import Tensor

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.progress import PROGRESS, made_progress

Part: TypeAlias = "dict[str, Tensor]"

AHEAD = 2
"""Microbatches with views that may be buffered ahead of the trainer."""


class TeacherOutputsLost(Worded, RuntimeError):
    """The teachers cannot deliver the rest of a step's outputs."""

    message = "the step goes on without its SDPO signals: {0}"


class TeacherOutputBuffer:
    """The teacher outputs of one step of one trainer rank.

    `parts` lists the teachers that share each microbatch with views, in the order in which the
    training thread takes the microbatches.
    """

    def __init__(self, parts: dict[int, list[int]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._order = list(parts)
        self._moved = asyncio.Condition()
        self._taken = 0
        self._parts: dict[tuple[int, int], concurrent.futures.Future[Part]] = {
            (micro, part): concurrent.futures.Future()
            for micro, wanted in parts.items()
            for part in wanted
        }
        self._choices: dict[int, asyncio.Future[Tensor]] = {
            micro: self._loop.create_future() for micro in parts
        }
        self._lost: str | None = None

    # --- on the event loop

    async def wait_for_capacity(self, micro: int) -> None:
        """Wait until a microbatch is close enough to the training thread's position to be buffered.

        Raises `TeacherOutputsLost` when the step no longer needs it.
        """
        place = self._order.index(micro)
        async with self._moved:
            await self._moved.wait_for(
                lambda: place < self._taken + AHEAD or self._lost is not None
            )
            if self._lost is not None:
                raise TeacherOutputsLost(self._lost)

    def deliver(self, micro: int, part: int, tensors: Part) -> None:
        """Store one teacher's part; the training thread may take it from now on."""
        future = self._parts[micro, part]
        if not future.done():
            future.set_result(tensors)

    async def choice(self, micro: int) -> Tensor:
        """Return the student's top k ids [N, K]. Waits for the training thread's forward."""
        return await asyncio.shield(self._choices[micro])

    async def lose(self, reason: str) -> None:
        """Fail the rest of the step: all waiting callers get `TeacherOutputsLost`."""
        self._lost = reason
        for future in self._parts.values():
            if not future.done():
                future.set_exception(TeacherOutputsLost(reason))
        for choice in self._choices.values():
            if not choice.done():
                choice.set_exception(TeacherOutputsLost(reason))
                choice.exception()  # marks the exception as retrieved, in case nothing awaits it
        async with self._moved:
            self._moved.notify_all()

    # --- on the training thread

    def offer_choice(self, micro: int, ids: Tensor) -> None:
        """Publish the top k ids that the student chose, for the teachers."""
        future = self._choices[micro]
        self._loop.call_soon_threadsafe(_settle, future, ids)

    def take(self, micro: int) -> Part:
        """Return a microbatch's concatenated parts. Blocks for them.

        The deadlines of the controller's calls bound this: to the teachers, and to this process.
        """
        futures = [future for key, future in self._parts.items() if key[0] == micro]
        with PROGRESS.waiting("the SDPO teachers"):
            parts = [future.result() for future in futures]
        made_progress(f"the teacher output for microbatch {micro + 1}")
        asyncio.run_coroutine_threadsafe(self._advance(), self._loop)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    async def _advance(self) -> None:
        async with self._moved:
            self._taken += 1
            self._moved.notify_all()


def _settle(future: "asyncio.Future[Tensor]", ids: Tensor) -> None:
    if not future.done():
        future.set_result(ids)
