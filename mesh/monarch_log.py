"""Monarch's own log: one bounded file per process, which only the user can read.

Monarch opens `/tmp/USER/monarch_log.log` when its native part is imported: a path that others can
predict, and whose links it follows. So the name gets a random part before the import, the file is
removed right after it, and its descriptor is pointed at a file in a private folder before Monarch
is used. The folder is `logs/` of the run directory (`LOGS`), else of the private folder. Imports
Monarch only in `open_log`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import stat
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.private_folder import subfolder

LOGS = "COMPOSER_MESH_LOGS"
"""Environment variable with the folder of the logs of a run."""
SUFFIX = "MONARCH_LOG_SUFFIX"
NATIVE = "monarch._rust_bindings.monarch_hyperactor.bootstrap"
SHARED = "monarch_log.log"
OPENED = re.compile(r"/monarch_log(_\w+)?\.log( \(deleted\))?$")
LARGEST_BYTES = 4 << 20
"""Size at which a log is renamed to `.1`, which replaces an earlier one."""
SPARE_BYTES = 16 << 20
"""Free space of a disk below which nothing is logged on it.

Monarch prints an error for each line that it cannot log, which would bury the run's own message.
"""
LOOK_S = 0.5


@dataclass(frozen=True)
class BoundedLog:
    """A log file behind a descriptor that a library writes to."""

    path: Path
    descriptor: int
    largest_bytes: int = LARGEST_BYTES
    spare_bytes: int = SPARE_BYTES

    def attach(self) -> None:
        """Point the descriptor at the file; refuses one that is a link."""
        file = open_in_logs(self.path)
        try:
            os.dup2(file, self.descriptor, inheritable=False)
        finally:
            os.close(file)

    def discard(self) -> None:
        """Point the descriptor at nothing."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self.descriptor, inheritable=False)
        finally:
            os.close(nowhere)

    def rotate(self) -> None:
        """Start another file if this one is full; the last full one is kept.

        While the disk is nearly full nothing is logged.
        """
        about = os.fstat(self.descriptor)
        discarded, disk = stat.S_ISCHR(about.st_mode), os.statvfs(self.path.parent)
        if disk.f_bavail * disk.f_frsize < self.spare_bytes:
            if not discarded:
                self.discard()
        elif discarded:
            self.attach()
        elif about.st_size >= self.largest_bytes:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            self.attach()

    def keep_bounded(self) -> None:
        """Rotate the file whenever it is full, until the run directory is gone."""
        with contextlib.suppress(OSError):
            while True:
                self.rotate()
                time.sleep(LOOK_S)


_of_this_process: list[BoundedLog] = []
_one_at_a_time = threading.Lock()


def open_log(name: str) -> Path | None:
    """Import Monarch with its log in a private folder; return its path.

    `name` is this process's, as in `generator-0`. Later calls change nothing. None where the
    operating system does not tell which files are open.
    """
    with _one_at_a_time:
        if not _of_this_process:
            if NATIVE not in sys.modules:
                _import_monarch()
            opened = _opened_by_monarch()
            if opened is None:
                return None
            log = BoundedLog(log_folder() / f"monarch-{name}.log", opened)
            log.discard()
            log.rotate()
            threading.Thread(target=log.keep_bounded, name="log of Monarch", daemon=True).start()
            _of_this_process.append(log)
        return _of_this_process[0].path


def log_folder() -> Path:
    """Return the folder of the logs of this run, made if it is missing."""
    if LOGS not in os.environ:
        return subfolder("logs")
    folder = Path(os.environ[LOGS])
    folder.mkdir(mode=0o700, exist_ok=True)  # a run directory that is gone stays gone
    return folder


def open_in_logs(path: Path) -> int:
    """Open a file of a folder of logs for appending, through no link; return its descriptor."""
    with OpenFolder(path.parent.parent) as above:
        name = f"{path.parent.name}/{path.name}"
        return above.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _import_monarch() -> None:
    """Import Monarch's native part, which opens a file of an unpredictable name."""
    umask = os.umask(0o077)
    os.environ[SUFFIX] = os.urandom(16).hex()  # another one than its starter's
    try:
        importlib.import_module(NATIVE)
    finally:
        os.umask(umask)
    remove_opened()
    os.environ[SUFFIX] = os.urandom(16).hex()  # for children that Monarch starts itself


def remove_opened() -> None:
    """Remove the file that Monarch opened, if it is this process's alone; it stays open."""
    opened = _opened_by_monarch()
    file = Path(SHARED if opened is None else _target(opened))
    if file.name == SHARED:
        return
    with contextlib.suppress(OSError):
        file.unlink()
        if file.parent.parent == Path("/tmp"):
            file.parent.rmdir()  # where nothing else uses it


def _opened_by_monarch() -> int | None:
    """Return the descriptor of the file that Monarch logs to."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names are numbers
            if OPENED.search(_target(int(name))):
                return int(name)
    return None


def _target(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    return ""
