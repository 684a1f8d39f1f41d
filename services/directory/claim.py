"""Locks on run directories, so that no run is ever overwritten.

Signatures of files in a run directory: whether this account's own program wrote them.

A run directory may come from anybody, also where its files belong to the viewer, as those of an
unpacked archive do. So a file that decides what is run, or where API keys are sent, is signed with
a key that only this account can read (HMAC-SHA256); the key never leaves its folder. A signature is
about one content under one name in one folder, so that no file counts in a folder to which somebody
has copied it with its signature:

    ~/.local/state/composer-mesh/signing.key      or below $XDG_STATE_HOME
    RUN/.launch.json.signature                    next to the file that it signs

Without its signature a file is data: it may be shown, and nothing is done because of it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import psutil

from composer_mesh.configs.regular_files import UnusableFile, open_regular, read_regular
from composer_mesh.mesh.open_folder import OpenFolder, refuse_links
from composer_mesh.mesh.untrusted_json import MIB

KEY_FILE = "signing.key"
KEY_BYTES = 32
LONGEST = 16 * MIB
"""Size in bytes of the largest file that is signed."""
STATE_HOME = "XDG_STATE_HOME"

log = logging.getLogger(__name__)


def sign(path: Path, content: bytes) -> None:
    """Write the signature of a file's new content.

    Where the key cannot be kept the file stays without one, which is logged: then commands treat it
    as a stranger's.
    """
    try:
        with OpenFolder(path.parent) as folder:
            signature = _signature(_key(create=True), path, content)
            folder.write_whole(signature_file(path).name, signature)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        log.warning("%s is not signed, so it counts as a stranger's: %s", path, error)


def is_signed(path: Path, content: bytes) -> bool:
    """Return whether this account's program wrote a file with this content."""
    try:
        found = read_regular(signature_file(path), 2 * hashlib.sha256().digest_size)
        expected = _signature(_key(create=False), path, content)
    except (OSError, RuntimeError):
        return False
    return hmac.compare_digest(found, expected)


def own_content(path: Path) -> bytes | None:
    """Return the content of a file that this account's program wrote; None for any other one."""
    try:
        content = read_regular(path, LONGEST)
    except OSError:
        return None
    return content if is_signed(path, content) else None


def signature_file(path: Path) -> Path:
    """Return the path of a file's signature."""
    return path.with_name(f".{path.name}.signature")


def key_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the key; raises RuntimeError if there is no home folder."""
    stated = environ.get(STATE_HOME, "")
    home = Path(stated) if stated.startswith("/") else Path.home() / ".local" / "state"
    return home / "composer-mesh"


def _signature(key: bytes, path: Path, content: bytes) -> bytes:
    """Return the signature of a content in its place, wherever links lead to that."""
    message = b"\0".join([os.fsencode(path.name), os.fsencode(path.parent.resolve()), content])
    return hmac.new(key, message, hashlib.sha256).hexdigest().encode()


def _key(create: bool) -> bytes:
    path = key_folder() / KEY_FILE
    if create and not path.exists():
        _make_key(path)
    with open_regular(path, follow=False) as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UnusableFile(None, "others can use it: remove it", str(path))
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise UnusableFile(None, f"it has not {KEY_BYTES} bytes: remove it", str(path))
    return key


def _make_key(path: Path) -> None:
    """Create the key, complete or not at all; one that another process has created stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink(missing_ok=True)


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
        place, own = _free_place(output), {one: own_content(output / one) for one in SIGNED}
        output.rename(place)
        for name, content in own.items():
            if content is not None:
                sign(place / name, content)
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
