"""Whether the process that left something open in a ledger still lives.

A process is its id and when it started, because ids are used again. It is looked for on this
machine only.
"""

from pathlib import Path

from composer_mesh.mesh.processes import is_alive

_START_FIELD = 19  # of what follows the command's name in /proc/PID/stat


def started_at(pid: int) -> str:
    """When a process started, as its system says it; "" where it does not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{boot} {stat.rpartition(')')[2].split()[_START_FIELD]}"


def owner_lives(pid: int, started: str) -> bool:
    """Whether this very process still runs."""
    return is_alive(pid) and started_at(pid) == started
