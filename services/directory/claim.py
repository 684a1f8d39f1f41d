"""Locks on run directories, so that no run is ever overwritten."""

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import psutil

from composer_mesh.configs.regular_files import UnusableFile, read_regular
from composer_mesh.mesh.open_folder import OpenFolder, refuse_links
from composer_mesh.services.directory.signatures import LONGEST, is_own, sign

RUNS = Path("runs")
LOCK_FILE = ".lock"
LONGEST_LOCK = 64
MOST_PIDS = 2**22
SIGNED = ("config.toml", "launch.json")
# Any of these indicates that a run was started in the directory.
_TRACES_OF_A_RUN = ("config.toml", "metrics.jsonl", "events.jsonl", "summary.json", "traces")


LONGEST_NAME = 200
LONGEST_PATH = 3500
"""Bytes of a name and of a path, so that what a run adds to them fits as well."""


def output_path(text: str) -> Path:
    """Parse an option that names where to write; raise argparse's error for an impossible path."""
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if not text.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is empty but must name a place: write one, such as runs/mine"
        )
    if "\0" in text or longest > LONGEST_NAME or len(os.fsencode(text)) > LONGEST_PATH:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}... has {len(text)} characters and a name of {longest} bytes, at most "
            f"{LONGEST_PATH} and {LONGEST_NAME}, without zero bytes: name a shorter place"
        )
    return Path(text)


class RunDirectoryError(Exception):
    """The directory cannot be used for this run; the message says why and what to do instead."""


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Lock `output` for a block.

    Raises RunDirectoryError if another run holds it, or if a link below it leads out of it.

    The operating system releases the lock when the process ends, however it ends.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{output} must be a directory but cannot be made ({error.strerror}): name another "
            "place with --output"
        ) from None
    refuse_outward_links(output)
    with _disk_errors(output), OpenFolder(output) as folder:
        descriptor = folder.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with FileIO(descriptor, "ab+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(_in_use(output)) from None
        with _disk_errors(output):
            lock.truncate(0)
            lock.write(b"%d\n" % os.getpid())
        yield


def refuse_outward_links(output: Path) -> None:
    """Raise RunDirectoryError if a link below a directory leads out of it."""
    with _disk_errors(output):
        refuse_links(output)


def holder(output: Path) -> int | None:
    """Return the process of this machine that holds a directory's lock, or None.

    The lock is only inspected: trying to take it could block a run that is starting.
    """
    lock, pid = output.resolve() / LOCK_FILE, locker(output)
    try:
        opened = psutil.Process(pid).open_files() if pid is not None else []
    except psutil.Error:
        return None
    return pid if str(lock) in (one.path for one in opened) else None


def locker(output: Path) -> int | None:
    """Return the process that last locked the directory, which may be gone; None without one.

    A link is not followed: it could lead to the lock of another run.
    """
    try:
        text = read_regular(output / LOCK_FILE, LONGEST_LOCK, follow=False).strip()
    except OSError:
        return None
    pid = int(text) if text.isdigit() else 0
    return pid if 0 < pid <= MOST_PIDS else None


def set_aside(output: Path) -> Path | None:
    """Move an earlier run to `output.1`, `.2`, …; return its new path, or None without one.

    What this account has signed there is signed in the new place.
    """
    if not holds_a_run(output):
        return None
    with claimed(output), _disk_errors(output):  # fails while that run is still being written
        place, own = _free_place(output), [one for one in SIGNED if is_own(output / one)]
        output.rename(place)
        for name in own:
            sign(place / name, read_regular(place / name, LONGEST))
    return place


def refuse_a_used(output: Path) -> None:
    """Raise RunDirectoryError if the directory that the user named already holds a run."""
    if holds_a_run(output):
        raise RunDirectoryError(
            f"--output {output} already holds a run but must be empty or new: name another "
            "directory, or move that run away"
        )


def holds_a_run(output: Path) -> bool:
    """Return whether a run was started in this directory, finished or not."""
    with _disk_errors(output):
        return any((output / name).exists() for name in _TRACES_OF_A_RUN)


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except UnusableFile as error:
        raise RunDirectoryError(str(error)) from None
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or output} cannot be used for a run ({error.strerror}): free the "
            "disk or correct its permissions, or name another place with --output"
        ) from None


def _free_place(output: Path) -> Path:
    number = 1
    while (place := output.with_name(f"{output.name}.{number}")).exists():
        number += 1
    return place


def _in_use(output: Path) -> str:
    return (
        f"{output} is being written by a running train (process "
        f"{locker(output) or 'unknown'}) but takes one run at a time: "
        "wait for it, or name another directory with --output"
    )
