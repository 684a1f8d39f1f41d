"""An asyncio loop whose clock jumps to the next thing that is due: hours of waiting in a moment.

    asyncio.Runner(loop_factory=SimulatedLoop)

Whoever asks the loop for the time gets simulated seconds, and each run of the same program gives
the same ones, whatever else the machine does. Nothing here may wait for threads, files or sockets.
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time, and happen in the order of their ends."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.BaseSelector):
    """A selector that waits for nothing but the clock, and moves it."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop, self._files = loop, selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody and nothing is due: a deadlock")
        self._loop.now += max(0.0, timeout)
        return self._files.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()
