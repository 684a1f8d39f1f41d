"""`composer-mesh scale`: more or fewer replicas in a live run.

    changed = await scale(Path("runs/quickstart"), generator=3)

It asks the run's controller, which decides and does it; nothing here starts or stops a process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.services.directory.control import ControlRefused, ask

Change = dict[str, dict[str, int]]


async def scale(run: Path | str, **wanted: int) -> Change:
    """Have so many replicas of each kind in a live run; returns how many there were and are.

    Waits until new replicas serve and old ones have left. Raises `ControlRefused` where the run
    does not do it, and `RunUnavailable` where there is none that could.
    """
    changed: Change = await ask(Path(run), "scale", **wanted)
    return changed


def scale_command(run: Path, sizes: Sequence[str]) -> int:
    """Change the pools of a live run and say what changed. The result is the exit status."""
    changed = asyncio.run(scale(run, **read_sizes(sizes)))
    for kind, change in changed.items():
        sys.stdout.write(f"{kind}: {change['before']} -> {change['after']}\n")
    return 0


def read_sizes(sizes: Sequence[str]) -> dict[str, int]:
    """What was typed as KIND=N, each kind once."""
    wanted: dict[str, int] = {}
    for size in sizes:
        kind, _, count = size.partition("=")
        if not kind or not count.isdecimal() or kind in wanted:
            raise ControlRefused(
                f"{size!r} is not KIND=N with a new kind: write for example generator=3"
            )
        wanted[kind] = int(count)
    return wanted
