"""Follows a launched run: its controller's output and exit status."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from composer_mesh.services.directory.status import STATUS_FILE, read_status
from composer_mesh.services.launch.handle import LAUNCH_FILE
from composer_mesh.services.launch.ports import Handle, Launcher
from composer_mesh.services.schedule.stopping import STOPPED

FAILED, INTERRUPTED = 1, 130
STATUSES = {"finished": 0, "stopped": STOPPED, "failed": FAILED}
"""Exit statuses by the controller's final state."""
GOOD_WORDS = frozenset({"completed", "succeeded"})
"""Cluster states of successful jobs, used if the run's status is not readable from here."""


def follow(launcher: Launcher, handle: Handle, place: Path) -> int:
    """Print the controller's output until the run has ended; return its exit status.

    Ctrl-C only stops following.
    """
    try:
        for line in launcher.follow(handle):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(
            "\ncomposer-mesh: not followed any more, and the run goes on: end it with "
            f"composer-mesh stop {shlex.quote(str(place))}\n"
        )
        return INTERRUPTED
    return outcome(launcher, handle, place)


def outcome(launcher: Launcher, handle: Handle, place: Path) -> int:
    """Return the exit status of a run that was launched last from `place`."""
    status = read_status(place)
    if status is not None and is_newer(place / STATUS_FILE, place / LAUNCH_FILE):
        return STATUSES.get(status.state, FAILED)  # if killed, the status still says running
    word = launcher.state(handle)[1].lower()
    return 0 if GOOD_WORDS & set(word.split()) else FAILED


def is_newer(one: Path, other: Path) -> bool:
    """Whether a file was written after another one, or at the same time."""
    return one.stat().st_mtime >= other.stat().st_mtime
