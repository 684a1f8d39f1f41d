"""A program whose loop stands still until its watchdog reports it; prints the report."""

from __future__ import annotations

import asyncio
import json
import threading

from composer_mesh.mesh.loop_watchdog import LoopWatchdog

TIMES = 60
"""A watchdog without a core of its own counts little of a block, and the loop blocks again."""


def stand_still() -> None:
    """Until long after the watchdog must have noticed."""
    threading.Event().wait(1.0)


async def main() -> None:
    told = threading.Event()

    def report(seconds: float, stack: str) -> None:
        if not told.is_set():
            print(json.dumps([seconds, stack]), flush=True)
        told.set()

    watchdog = LoopWatchdog(limit_s=0.2, report=report, period_s=0.01)
    watchdog.start()
    for _ in range(TIMES):
        stand_still()
        if await asyncio.to_thread(told.wait, 1.0):
            break
    watchdog.stop()


if __name__ == "__main__":
    asyncio.run(main())
