"""A program whose loop stands still until its watchdog reports it; prints the report."""

from __future__ import annotations

import asyncio
import json
import threading

from composer_mesh.mesh.loop_watchdog import LoopWatchdog

BLOCKS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""A watchdog without a core of its own counts little of a block, and the next one is longer."""


def stand_still(seconds: float) -> None:
    """Until long after the watchdog must have noticed, where it has a core."""
    threading.Event().wait(seconds)


async def main() -> None:
    told = threading.Event()

    def report(seconds: float, stack: str) -> None:
        if not told.is_set():
            print(json.dumps([seconds, stack]), flush=True)
        told.set()

    watchdog = LoopWatchdog(limit_s=0.2, report=report, period_s=0.1)
    watchdog.start()
    for seconds in BLOCKS_S:
        stand_still(seconds)
        if await asyncio.to_thread(told.wait, 1.0):
            break
    watchdog.stop()


if __name__ == "__main__":
    asyncio.run(main())
