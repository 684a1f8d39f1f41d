"""How islands have ended, from what they recorded, and waiting for that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from composer_mesh.plugins.islands.jobs.ports import ReplicaState
from composer_mesh.services.directory.status import EVENTS_FILE
from composer_mesh.services.inspection.events_command import event_of


def failure_of(output: Path) -> str:
    """Return what a run recorded as the cause of its failure; "" if nothing."""
    events = output / EVENTS_FILE
    lines = events.read_text(errors="replace").splitlines() if events.is_file() else []
    told = (event_of(line) for line in reversed(lines))
    failed = next((event for event in told if event and event.get("event") == "run_failed"), None)
    return str(failed["detail"]) if failed is not None and failed.get("detail") else ""


def wait_for_all(
    poll: Callable[[], list[ReplicaState]],
    sleep: Callable[[float], None],
    poll_s: float,
    timeout_s: float | None,
) -> list[ReplicaState]:
    """Return the last states. Waits until all islands have ended.

    Raises TimeoutError after `timeout_s`.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        states = poll()
        if all(one.ended for one in states):
            return states
        if until is not None and time.monotonic() >= until:
            left = [one.rank for one in states if not one.ended]
            raise TimeoutError(f"islands {left} have not ended after {timeout_s:g} s")
        sleep(poll_s)
