"""An asyncio event loop with simulated time: its clock jumps to the next scheduled event.

    asyncio.Runner(loop_factory=SimulatedLoop)

`loop.time()` returns simulated seconds, and each run of the same program gives the same ones,
whatever the load of the machine. Must not wait for threads, files or sockets.
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time, and end in order."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.BaseSelector):
    """A selector that waits for nothing but the clock, and advances it."""

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
