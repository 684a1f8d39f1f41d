"""Whether the process that left something open in a ledger still lives.

A process is its id and when it started, because ids are used again. It is looked for on this
machine only.
"""

from pathlib import Path

from composer_mesh.mesh.processes import is_alive, start_ticks


def started_at(pid: int) -> str:
    """When a process started, as its system says it; "" where it does not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    ticks = start_ticks(pid)
    return f"{boot} {ticks}" if ticks else ""


def owner_lives(pid: int, started: str) -> bool:
    """Whether this very process still runs."""
    return is_alive(pid) and started_at(pid) == started
