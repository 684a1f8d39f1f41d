"""Closed batches whose requests come in shares, one from each caller.

A batch is given to the engine when all of its requests are there, sorted by name: which caller sent
which of them, and in which order they came, changes nothing in what the engine computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from composer_mesh.rollouts.generation import GenerationRequest

T = TypeVar("T")


@dataclass
class _Round(Generic[T]):
    """One batch that is not complete; `started` is done when its requests were given away."""

    continues: bool
    started: asyncio.Future[dict[str, T]]
    requests: list[GenerationRequest] = field(default_factory=list)


class Rounds(Generic[T]):
    """The closed batches of one engine; `ask` gives it one and returns what is awaited.

    It is told whether the batch continues the one before it, whose prefixes are then reused.
    """

    def __init__(self, ask: Callable[[list[GenerationRequest], bool], list[T]]) -> None:
        self._ask = ask
        self._open: dict[int, _Round[T]] = {}
        self._closed = -1

    async def share(
        self, number: int, size: int, requests: list[GenerationRequest], continues: bool
    ) -> list[T]:
        """Return what `ask` returned for the requests of one share, in order.

        Waits until the round has `size` requests. A share of a closed round is asked at once.
        """
        if number <= self._closed:
            return self._ask(requests, True)
        started = asyncio.get_running_loop().create_future
        turn = self._open.setdefault(number, _Round(continues, started()))
        turn.requests += requests
        if len(turn.requests) >= size:
            self._start(number)
        asked = await asyncio.shield(turn.started)
        return [asked[request.request_id] for request in requests]

    def close(self, number: int) -> None:
        """Ask what has arrived of a round, and of every round before it."""
        self._closed = max(self._closed, number)
        for one in [one for one in self._open if one <= number]:
            self._start(one)

    def _start(self, number: int) -> None:
        turn = self._open.pop(number)
        ordered = sorted(turn.requests, key=lambda request: request.request_id)
        try:
            asked = self._ask(ordered, turn.continues)
        except Exception as error:  # noqa: BLE001  each share's caller must get it
            turn.started.set_exception(error)
            return
        names = [request.request_id for request in ordered]
        turn.started.set_result(dict(zip(names, asked, strict=True)))
