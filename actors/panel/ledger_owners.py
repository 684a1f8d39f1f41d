"""Whether the process that owns open ledger reservations is still alive.

A process is identified by its id and start time, because ids are reused. Only processes of this
machine are found.
"""

from pathlib import Path

from composer_mesh.mesh.processes import is_alive, start_ticks


def started_at(pid: int) -> str:
    """Return a process's boot id and start time; "" if the system does not report it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    ticks = start_ticks(pid)
    return f"{boot} {ticks}" if ticks else ""


def owner_lives(pid: int, started: str) -> bool:
    """Return whether exactly this process is still running."""
    return is_alive(pid) and started_at(pid) == started
