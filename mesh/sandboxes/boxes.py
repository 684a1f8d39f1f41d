"""A sandbox of bubblewrap or nsjail: a box for each command, and nothing between commands.

A box has namespaces of its own (users, processes, network, mounts, names, IPC, control groups), no
rights, a filter of system calls, limits, and a root with nothing in it that is not needed. The
tree goes in and the changes come out over a socket; both are bounded, and every name is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_code
from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.mesh.sandboxes.box_process import UIDS_A_KEEPER, ControlGroups, writable_groups
from composer_mesh.mesh.sandboxes.box_stream import Reported, job_bytes, read_reported
from composer_mesh.mesh.sandboxes.keeper import REPORTED
from composer_mesh.mesh.sandboxes.launchers import filter_file, find_launcher
from composer_mesh.mesh.sandboxes.root import build_root
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import (
    MIB,
    CommandResult,
    FileTree,
    SandboxError,
    SandboxLimits,
)

FIRST_UID = 170_000
MOST_BOXES = UIDS_A_KEEPER // 4
START_GRACE_S = 30.0
"""What a box may take in addition to its command: to start, unpack the tree and report."""
KEEPERS_TRIED = 3
"""How many keepers are tried for one box before the command fails."""
BOX_BYTES = 48 * MIB
"""Memory of the launcher and the runner, in addition to the command and its files."""
ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/w",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONPATH": "/packages",
    "PYTHONDONTWRITEBYTECODE": "1",
}
KEEPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from composer_mesh.mesh.sandboxes.keeper import main; main()"
)


class Boxes:
    """Runs commands in boxes of bubblewrap, or of nsjail where there is none, some at once."""

    def __init__(
        self,
        boxes: int | None = None,
        packages: Sequence[str] = ("pytest",),
        folders: Sequence[str | Path] = (),
        first_uid: int = FIRST_UID,
        start_s: float = START_GRACE_S,
        bytecode: bool = False,
        launcher: str = "any",
    ) -> None:
        """Copy the root and start the keeper; `probes.open_sandbox` tries what holds, too."""
        self._boxes = (os.cpu_count() or 1) if boxes is None else boxes
        if not 1 <= self._boxes <= MOST_BOXES:
            raise UnusableTask(
                f"environment.sandbox.options.boxes is {boxes}: choose 1 to {MOST_BOXES}"
            )
        self._start_s = start_s
        self.launcher = find_launcher(launcher)
        self._first_uid = first_uid if os.geteuid() == 0 else None
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._files = contextlib.ExitStack()
        self.folder = entered_folder()
        self._files.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._root = self.folder / secrets.token_hex(16)
        build_root(self._root, packages, [Path(one) for one in folders], bytecode=bytecode)
        self._descriptors = self._opened()
        self.groups, self.groups_told = writable_groups()
        self._control: socket.socket | None = None
        self.keeper = self._start_keeper()

    @property
    def runs_as(self) -> str:
        """Who a box runs as."""
        if self._first_uid is None:
            return f"user {os.geteuid()}, whose files it does not see"
        return f"a user of its own from {self._first_uid} on"

    async def run(
        self,
        tree: FileTree,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008 it is immutable
        environment: Mapping[str, str] = {},
    ) -> CommandResult:
        """Run a command on a tree. Waits for a box; raises SandboxError where that fails."""
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._boxes))
        variables = {**ENVIRONMENT, **environment}
        async with places:
            return await self._run(tree, job_bytes(tree, argv, stdin, limits, variables), limits)

    async def close(self) -> None:
        """End all boxes, the keeper and the root."""
        if self._control is not None:
            self._control.close()
            self._control = None
            await asyncio.to_thread(programs.reap, self.keeper)
            await asyncio.to_thread(self._files.close)

    async def _run(self, tree: FileTree, job: bytes, limits: SandboxLimits) -> CommandResult:
        status, channel = await self._start_box(tree, limits)
        try:
            reader, writer = await asyncio.open_connection(sock=channel)
            try:
                with contextlib.suppress(ConnectionError):  # the box ended: its status says why
                    writer.write(job)
                    await writer.drain()
                reported = await read_reported(reader, tree, limits)
            finally:
                writer.close()
            if reported.complete and reported.ended != "signal":
                with contextlib.suppress(OSError):
                    status.send(REPORTED)
                return result_of(reported, {})
            return result_of(reported, await _keeper_report(status))
        finally:
            status.close()  # ends the box, if it has not ended

    async def _start_box(
        self, tree: FileTree, limits: SandboxLimits
    ) -> tuple[socket.socket, socket.socket]:
        """Return the status socket of a new box and its runner's.

        A keeper that was killed meanwhile is replaced and the new one tried: no command has been
        sent to the box yet, so none runs twice. Raises SandboxError.
        """
        for attempt in range(1, KEEPERS_TRIED + 1):
            status = self._request_box(tree, limits)
            keeper = self.keeper
            try:
                return status, await _channel(status)
            except KeeperKilledError:
                status.close()
                if attempt == KEEPERS_TRIED:
                    raise
                self._replace(keeper)
            except BaseException:
                status.close()
                raise
        raise AssertionError("the last attempt returns or raises")

    def _request_box(self, tree: FileTree, limits: SandboxLimits) -> socket.socket:
        """Ask the keeper for a box; return the socket that tells of it and holds it."""
        request = json.dumps(_request(tree, limits, self._start_s)).encode()
        status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.setblocking(False)
        with its_status:
            try:
                self._ask(request, [its_status.fileno()])
            except BaseException:
                status.close()
                raise
        return status

    def _ask(self, request: bytes, descriptors: list[int]) -> None:
        """Send a request to the keeper, to a new one if it was killed."""
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        try:
            socket.send_fds(self._control, [request], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(self.keeper)
            socket.send_fds(self._control, [request], descriptors)

    def _replace(self, keeper: int) -> None:
        """Start another keeper, unless another command has done so since `keeper` was killed."""
        if self._control is not None and self.keeper == keeper:
            self._control.close()
            programs.reap(keeper)
            self.keeper = self._start_keeper()

    def _opened(self) -> dict[str, int | None]:
        """Open what boxes are made of: the user of a box may be unable to reach the launcher."""
        binary, libraries = self.launcher.binary, self.launcher.libraries
        found = {
            "launcher": os.open(binary, os.O_RDONLY | os.O_CLOEXEC),
            "filter": filter_file(),
        }
        if libraries is not None:
            found["libraries"] = os.open(libraries, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for descriptor in found.values():
            self._files.callback(os.close, descriptor)
        return {"libraries": None, **found}

    def _start_keeper(self) -> int:
        self._control, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            **self._descriptors,
            "launcher_name": self.launcher.name,
            "control": its_own.fileno(),
            "folder": str(self.folder),
            "root": str(self._root),
            "first_uid": self._first_uid,
            "groups": _groups(self.groups),
            "spares": self._boxes,
        }
        passed = [one for one in self._descriptors.values() if one is not None]
        command = python_code(KEEPER, str(programs.PACKAGES), json.dumps(settings))
        command.insert(1, "-S")
        try:
            return programs.start_tied(command, {"PATH": os.defpath}, [*passed, its_own.fileno()])
        finally:
            its_own.close()


def _groups(groups: ControlGroups | None) -> dict[str, Any] | None:
    if groups is None:
        return None
    return {"parents": [str(one) for one in groups.parents], "unified": groups.unified}


def _request(tree: FileTree, limits: SandboxLimits, start_s: float) -> dict[str, Any]:
    """Return what the keeper has to know: sizes of folders, bounds of groups, the last moment."""
    contents = [tree.read(path) for path in tree.files()]
    pages = sum(-(-len(one) // PAGE) * PAGE + PAGE for one in contents) + PAGE
    whole = limits.disk_bytes
    return {
        "sizes": [
            -(-pages // MIB) * MIB + whole * 3 // 4,
            whole * 3 // 16 + PAGE,
            whole // 16 + PAGE,
        ],
        "group_bytes": limits.memory_bytes + whole + 3 * pages + BOX_BYTES,
        "processes": limits.processes,
        "deadline_s": limits.wall_s + start_s,
    }


PAGE = 4096


async def _channel(status: socket.socket) -> socket.socket:
    """Return the socket of a box's runner. Waits for the box to be forked."""
    ready = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.add_reader(status, ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(status)
    said, descriptors, _, _ = socket.recv_fds(status, 1 << 16, 1)
    if not descriptors:
        raise _unstarted(said)
    channel = socket.socket(fileno=descriptors[0])
    channel.setblocking(False)
    return channel


class KeeperKilledError(SandboxError):
    """The process that starts boxes was killed while a box was its to start or to watch."""


def _unstarted(said: bytes) -> SandboxError:
    if not said:
        return KeeperKilledError("the keeper of the boxes was killed: run the command again")
    return SandboxError(f"no box could be started: {json.loads(said)['errors']}")


async def _keeper_report(status: socket.socket) -> dict[str, Any]:
    """Return what the keeper says of a box that has ended. Waits for its end."""
    loop = asyncio.get_running_loop()
    try:
        said = await loop.sock_recv(status, 1 << 16)
    except ConnectionResetError:
        said = b""
    if not said:
        raise _unstarted(said)
    return json.loads(said)


def result_of(reported: Reported, report: Mapping[str, Any]) -> CommandResult:
    """Return how a command ended; raise SandboxError where its box never started it."""
    if not reported.started:  # so its status was requested
        why = "it did not start in time" if report["late"] else report["errors"].strip()
        raise SandboxError(
            f"a box failed, wait status {report['status']}: {why or 'it said nothing'}"
        )
    ended = reported.ended if reported.complete else "signal"
    if report.get("late"):
        ended = "wall_time"
    elif ended == "signal" and report.get("memory"):
        ended = "memory"
    return CommandResult(
        exit_code=reported.exit_code if ended == "exited" else None,
        ended=ended,  # type: ignore[arg-type]
        stdout=reported.stdout,
        stderr=reported.stderr,
        output_cut=reported.cut,
        seconds=reported.seconds,
        changed=reported.changed if reported.complete else {},
        refused_paths=tuple(reported.refused) if reported.complete else (),
    )
