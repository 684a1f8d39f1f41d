"""What a run shows of the error that ended it: at most `MOST_LINES` lines, the user's own first.

The complete traceback is appended to `logs/errors.log` of the run directory.
"""

from __future__ import annotations

import errno
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.folder import CheckpointFailed, UnreadableCheckpoint
from composer_mesh.actors.learning.weight_update import GradientNotFinite
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.errors import ConfigError, one_line
from composer_mesh.configs.plugins import PluginFailed
from composer_mesh.mesh.monarch_log import open_in_logs
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, RemoteError
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.planning.placement_solver import NoCapacity
from composer_mesh.rollouts.chat import ChatTemplateError
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.inspection.census import failure_line
from composer_mesh.services.steps.step_manifest import UnreadableManifest
from composer_mesh.services.store.rows import DamagedRecord
from composer_mesh.services.store.writing import disk_error
from composer_mesh.tasks.errors import TaskError

MOST_LINES = 12
ERRORS_FILE = "errors.log"
OF_DISKS = frozenset(
    (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS)
)
"""Errors of a disk that is full, forbidden or broken, whoever writes to it."""
COMPLETE = (
    *(DamagedRecord, RunDirectoryError, StoreError, TransportUnavailable),
    *(ChatTemplateError, CheckpointFailed, ConfigError, NoCapacity, TaskError),
    *(GradientNotFinite, MeshError, PluginFailed, UnreadableCheckpoint, UnreadableManifest),
)
"""Errors whose message is complete, so that a traceback adds nothing but the user's own frames."""


@dataclass(frozen=True)
class FailureReport:
    """One line for events, and the text for the terminal."""

    line: str = ""
    text: str = ""


def report_failure(error: Exception, root: Path) -> FailureReport:
    """Return what is shown of an error of the run at `root`; log a traceback that is not shown."""
    if isinstance(error, OSError) and error.errno in OF_DISKS:
        text = str(disk_error(root, error))
        return FailureReport(text, text)
    frame = getattr(error, "frame", "")
    lines = failure_line(error, MeshHost.name).splitlines() if isinstance(error, MeshError) else []
    lines = lines or str(error).splitlines()
    remote = isinstance(error, RemoteError)
    if isinstance(error, COMPLETE) and not (frame or remote) and len(lines) <= MOST_LINES:
        return FailureReport(lines[-1] if lines else type(error).__name__, "\n".join(lines))
    line = one_line(f"{lines[0]} {lines[-1]}" if remote else " ".join(" ".join(lines).split()))
    if not (frame or isinstance(error, COMPLETE)):
        line = f"{type(error).__name__}: {line}"
    return FailureReport(line, "\n".join([*frame.splitlines(), line, _logged(error, root)]))


def _logged(error: Exception, root: Path) -> str:
    """Append the traceback of an error to the run's log; return the sentence that names it."""
    file = root / "logs" / ERRORS_FILE
    story = "".join(traceback.format_exception(error))
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(open_in_logs(file), "a", encoding="utf-8", errors="replace") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{story.rstrip()}\n\n")
    except OSError as failed:
        return f"its traceback could not be written to {file} ({failed.strerror}):\n{story}"
    return f"the complete traceback is in {file}"
