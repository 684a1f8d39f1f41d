"""Which directory a run may write to, so that no run is ever overwritten.

Only claims the place; what is written there is the run store's business.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUNS = Path("runs")
# Any of these says that a run was started here.
_TRACES_OF_A_RUN = ("config.toml", "metrics.jsonl", "events.jsonl", "summary.json", "traces")


class RunDirectoryError(Exception):
    """A directory that this run may not have: why, and what to do instead."""


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Hold `output` while the block runs; another run that asks for it is refused.

    The system gives the claim up when the process ends, however it ends.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{output} must be a directory but cannot be made ({error.strerror}): name another "
            "place with --output"
        ) from None
    with (output / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(_in_use(output)) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def holder(output: Path) -> int | None:
    """The process of this machine that holds a directory; None where nobody does.

    It only looks: who tried the lock would be in the way of a run that begins.
    """
    lock = (output / ".lock").resolve()
    try:
        pid = int(lock.read_text())
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        return None
    return pid if any(_leads_to(one, lock) for one in opened) else None


def set_aside(output: Path) -> Path | None:
    """Move an earlier run out of the way to `output.1`, `.2`, …; its new place, or None."""
    if not holds_a_run(output):
        return None
    with claimed(output):  # refuses while that run is still being written
        place = _free_place(output)
        output.rename(place)
    return place


def refuse_a_used(output: Path) -> None:
    """Raise when a run was already written to a directory that the user named."""
    if holds_a_run(output):
        raise RunDirectoryError(
            f"--output {output} already holds a run but must be empty or new: name another "
            "directory, or move that run away"
        )


def holds_a_run(output: Path) -> bool:
    """Whether a run was started in this directory, finished or not."""
    return any((output / name).exists() for name in _TRACES_OF_A_RUN)


def _leads_to(link: Path, file: Path) -> bool:
    try:
        return link.readlink() == file
    except OSError:  # closed meanwhile
        return False


def _free_place(output: Path) -> Path:
    number = 1
    while (place := output.with_name(f"{output.name}.{number}")).exists():
        number += 1
    return place


def _in_use(output: Path) -> str:
    return (
        f"{output} is being written by a running train (process "
        f"{(output / '.lock').read_text().strip() or 'unknown'}) but takes one run at a time: "
        "wait for it, or name another directory with --output"
    )
