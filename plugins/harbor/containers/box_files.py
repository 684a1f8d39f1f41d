"""Reads, writes and removes files of a container from inside of its root; follows no link.

Runs in a child of the keeper that has entered the container's mount namespace: nothing outside of
the container has a path there. Processes of the container may change its files meanwhile.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import stat
from collections.abc import Mapping
from typing import Any

from composer_mesh.mesh.sandboxes.box_process import close_all_but, die_with_parent
from composer_mesh.plugins.harbor.containers.box_exec import (
    Entered,
    Refused,
    UnmappedUser,
    contents,
    enter,
    failure,
    finish,
    looked_up,
    only_root,
)
from composer_mesh.plugins.harbor.images.trees import DEEPEST, FILE, FOLDER, copy_tree, remove_entry

MOST_FILES = 100_000
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK = 1 << 20


class _TooLarge(Exception):
    pass


def serve_files(entered: Entered, status: socket.socket, job_file: int) -> None:
    """Do one request in a container and report; never returns."""
    try:
        job = marshal.loads(contents(job_file))
        close_all_but(sorted({0, 1, 2, status.fileno(), entered.process, job_file}))
        enter(entered, processes=False)
        root = os.open("/", FOLDER)
        report = REQUESTS[job["request"]](root, job, job_file, entered.first_id is None)
    except Refused as error:
        report = {"unsupported": str(error)}
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        report = failure(error, entered)
    finish(status, report)


def copy_outside(status: socket.socket, source: str, target: str, keeper: int) -> None:
    """Copy a folder of the host to another, empty one, and report; never returns."""
    try:
        close_all_but(sorted({0, 1, 2, status.fileno()}))
        die_with_parent(keeper)
        copy_tree(os.open(source, FOLDER), os.open(target, FOLDER))
        report: dict[str, Any] = {"done": True}
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        report = failure(error)
    finish(status, report)


def _put(root: int, job: Mapping[str, Any], _file: int, only: bool) -> dict[str, Any]:
    user = looked_up(job["owner"])
    if only and (user.uid, user.gid) != (0, 0):
        raise UnmappedUser(only_root(job["owner"]))
    owner = (user.uid, user.gid)
    folder = made_folder(root, job["folder"], owner)
    for path, content in job["files"].items():
        above, _, name = path.rpartition("/")
        parent = made_folder(folder, above, owner)
        remove_entry(parent, name)
        file = os.open(name, NEW, 0o600, dir_fd=parent)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
            os.fchown(file, *owner)
            os.fchmod(file, 0o755 if path in job["executable"] else 0o644)
        finally:
            os.close(file)
            os.close(parent)
    return {"done": True}


def _prepare(root: int, job: Mapping[str, Any], _file: int, _only: bool) -> dict[str, Any]:
    """Make folders that an image lacks, and fill files that it leaves empty; links may be used.

    Nothing of the container has run yet, and nothing outside of it can be reached.
    """
    for path in job["folders"]:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    for path, content in job["files"].items():
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size:  # noqa: PTH116
                continue
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        remove_entry(root, path.lstrip("/"))
        _put(root, {**job, "folder": "", "files": {path.lstrip("/"): content}}, _file, _only)
    return {"done": True, "uid": looked_up(job["user"]).uid}


def _look(_root: int, job: Mapping[str, Any], _file: int, _only: bool) -> dict[str, Any]:
    """Return where paths really lead in the container, and whether folders are there."""
    return {"paths": [[os.path.realpath(one), os.path.isdir(one)] for one in job["paths"]]}  # noqa: PTH112


def made_folder(root: int, path: str, owner: tuple[int, int]) -> int:
    """Open a folder below an open one; what is no folder on the way is replaced by one."""
    folder = os.dup(root)
    for name in filter(None, path.split("/")):
        try:
            inner = os.open(name, FOLDER, dir_fd=folder)
        except FileNotFoundError:
            inner = _new_folder(folder, name, owner)
        except OSError:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise
            os.unlink(name, dir_fd=folder)
            inner = _new_folder(folder, name, owner)
        os.close(folder)
        folder = inner
    return folder


def _new_folder(parent: int, name: str, owner: tuple[int, int]) -> int:
    os.mkdir(name, 0o755, dir_fd=parent)
    folder = os.open(name, FOLDER, dir_fd=parent)
    os.fchown(folder, *owner)
    return folder


def opened_folder(root: int, path: str) -> int:
    """Open a folder below an open one; raises FileNotFoundError, also where a link leads there."""
    folder = os.dup(root)
    for name in filter(None, path.split("/")):
        try:
            inner = os.open(name, FOLDER, dir_fd=folder)
        except OSError:
            raise FileNotFoundError(path) from None
        finally:
            os.close(folder)
        folder = inner
    return folder


def _get(root: int, job: Mapping[str, Any], file: int, _only: bool) -> dict[str, Any]:
    try:
        folder = opened_folder(root, job["folder"])
    except FileNotFoundError:
        return {"missing": True}
    found: dict[bytes, bytes] = {}
    try:
        _read(folder, b"", found, [job["most_bytes"]], 0)
    except _TooLarge as error:
        return {"too_large": str(error)}
    answer = marshal.dumps(found)
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    left = memoryview(answer)
    while left:
        left = left[os.write(file, left) :]
    return {"done": True}


def _read(folder: int, path: bytes, found: dict[bytes, bytes], left: list[int], depth: int) -> None:
    """Read the regular files below a folder, no more than `left` bytes of them."""
    if depth > DEEPEST:
        raise _TooLarge(f"folders are nested deeper than {DEEPEST}")
    device = os.fstat(folder).st_dev
    for name in sorted(map(os.fsencode, os.listdir(folder))):
        here = path + b"/" + name if path else name
        mode = _mode(folder, name)
        if stat.S_ISDIR(mode):
            with contextlib.suppress(FileNotFoundError):
                inner = os.open(name, FOLDER, dir_fd=folder)
                try:
                    if os.fstat(inner).st_dev == device:
                        _read(inner, here, found, left, depth + 1)
                finally:
                    os.close(inner)
        elif stat.S_ISREG(mode):
            with contextlib.suppress(FileNotFoundError):
                found[here] = _content(folder, name, left)
                if len(found) > MOST_FILES:
                    raise _TooLarge(f"there are more than {MOST_FILES:,} files")


def _mode(folder: int, name: bytes) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _content(folder: int, name: bytes, left: list[int]) -> bytes:
    file = os.open(name, FILE, dir_fd=folder)
    try:
        content = bytearray()
        while piece := os.read(file, CHUNK):
            content += piece
            left[0] -= len(piece)
            if left[0] < 0:
                raise _TooLarge("there are more bytes than are taken")
        return bytes(content)
    finally:
        os.close(file)


def _remove(root: int, job: Mapping[str, Any], _file: int, _only: bool) -> dict[str, Any]:
    above, _, name = job["path"].strip("/").rpartition("/")
    with contextlib.suppress(FileNotFoundError):
        remove_entry(opened_folder(root, above), name)
    return {"done": True}


REQUESTS = {"put": _put, "get": _get, "remove": _remove, "prepare": _prepare, "look": _look}
