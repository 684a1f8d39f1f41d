"""Where teacher signals wait for the microbatch that needs them, between a loop and a thread.

Deliveries come on the loop and wait while they are too far ahead; the training thread takes them
in order and waits for what is missing. Nothing here reads a buffer or computes.
"""

import asyncio
import concurrent.futures
from typing import TypeAlias

import torch
from torch import Tensor

Part: TypeAlias = "dict[str, Tensor]"

AHEAD = 2
"""Microbatches with views that may lie ready before the trainer has come to them."""


class TeacherOutputsLost(RuntimeError):
    """The teachers cannot deliver the rest of a step's signals."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return f"the step goes on without its SDPO signals: {self.args[0]}"


class TeacherOutputBuffer:
    """The signals of one step of one trainer rank.

    `parts` says how many teachers share each microbatch that has views, in the order in which the
    thread will ask for them.
    """

    def __init__(self, parts: dict[int, list[int]], deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
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

    # --- on the loop

    async def wait_for_capacity(self, micro: int) -> None:
        """Wait until the thread is near enough to a microbatch for its signals to lie ready.

        Raises `TeacherOutputsLost` when nobody will need them.
        """
        place = self._order.index(micro)
        async with self._moved:
            await self._moved.wait_for(
                lambda: place < self._taken + AHEAD or self._lost is not None
            )
            if self._lost is not None:
                raise TeacherOutputsLost(self._lost)

    def deliver(self, micro: int, part: int, tensors: Part) -> None:
        """Hand over one teacher's part; the thread may take it from now on."""
        future = self._parts[micro, part]
        if not future.done():
            future.set_result(tensors)

    async def choice(self, micro: int) -> Tensor:
        """The student's top k ids [N, K]. Waits until the thread has made them."""
        return await asyncio.shield(self._choices[micro])

    async def lose(self, reason: str) -> None:
        """Nothing more will come: whoever waits gets `TeacherOutputsLost`."""
        self._lost = reason
        for future in self._parts.values():
            if not future.done():
                future.set_exception(TeacherOutputsLost(reason))
        for choice in self._choices.values():
            if not choice.done():
                choice.set_exception(TeacherOutputsLost(reason))
                choice.exception()  # nobody need be waiting for it
        async with self._moved:
            self._moved.notify_all()

    # --- on the training thread

    def offer_choice(self, micro: int, ids: Tensor) -> None:
        """Let the teachers know which entries the student asks about."""
        future = self._choices[micro]
        self._loop.call_soon_threadsafe(_settle, future, ids)

    def take(self, micro: int) -> Part:
        """All parts of a microbatch, one below the other. Waits for them, at most the deadline."""
        futures = [future for key, future in self._parts.items() if key[0] == micro]
        try:
            parts = [future.result(self._deadline_s) for future in futures]
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"the SDPO signal for microbatch {micro} did not come within {self._deadline_s:g} s"
                ": raise run.deadline_s, or give the teachers less work"
            ) from None
        asyncio.run_coroutine_threadsafe(self._advance(), self._loop)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    async def _advance(self) -> None:
        async with self._moved:
            self._taken += 1
            self._moved.notify_all()


def _settle(future: "asyncio.Future[Tensor]", ids: Tensor) -> None:
    if not future.done():
        future.set_result(ids)
