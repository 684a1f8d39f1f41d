"""The process that starts boxes, and ends them with the worker that requested them.

A worker has one keeper. For each box it forks, gives up its rights and becomes the launcher: a fork
of this small process costs a millisecond, one of a worker would not. A box ends when its status
socket is closed, at its deadline, and with the worker, however that ends. Imports only the standard
library, `cgroups` and `box_process`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from composer_mesh.mesh.hosts.process_lifetime import adopt_orphans
from composer_mesh.mesh.sandboxes.box_process import (
    COMMANDS,
    UIDS_A_KEEPER,
    BoxGroup,
    ControlGroups,
    Sizes,
    become_box,
    claimed_uids,
)

LONGEST_REQUEST = 1 << 16
MOST_ERRORS = 2000
LEAVE_S = 1.0
REPORTED = b"reported"
"""What the worker says of a box that has sent its whole report."""
LATE = -1.0
"""Deadline of a box that was killed at its deadline."""


@dataclass
class Settings:
    """What a worker tells its keeper: descriptors that it inherited, and who boxes run as.

    The keeper removes `folder`, in which the root lies, when the worker is gone.
    """

    control: int
    launcher: int
    launcher_name: str
    libraries: int | None
    folder: str
    root: str
    filter: int
    first_uid: int | None
    groups: dict[str, Any] | None
    spares: int


@dataclass
class Box:
    """A box: its process, the worker's end of its runner's socket, what is removed with it.

    One without a status socket is a spare: it waits for its command, and serves one only. One that
    was killed is here until its process is reaped.
    """

    process: int
    end: int
    channel: socket.socket
    errors: int
    slot: int
    group: BoxGroup | None
    sizes: Sizes
    status: socket.socket | None = None
    until: float = math.inf
    killed: bool = False


class Keeper:
    """Starts and ends boxes as its worker asks.

    A start takes longer than many commands, so after each one a spare box of the same sizes is
    started for the next.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._control = socket.socket(fileno=settings.control)
        self._groups = groups_of(settings.groups)
        self._uids, self._lock = claimed_uids(settings.first_uid)
        self._free = list(range(UIDS_A_KEEPER))
        self._waiting = selectors.DefaultSelector()
        self._boxes: dict[int, Box] = {}
        self._serving = True

    def serve(self) -> None:
        """Serve the worker until it is gone."""
        worker = os.pidfd_open(os.getppid())
        self._waiting.register(self._control, selectors.EVENT_READ, self._take_request)
        self._waiting.register(worker, selectors.EVENT_READ, self._stop)
        try:
            while self._serving:
                dispatch(self._waiting, self._patience())
                self._end_late_ones()
                self._reap_orphans()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all boxes, and remove all that was theirs."""
        for box in list(self._boxes.values()):
            self._kill(box)
            self._finish(box)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):  # what the killed boxes held
                pass
        shutil.rmtree(self._settings.folder, ignore_errors=True)

    def _stop(self) -> None:
        self._serving = False

    def _reap_orphans(self) -> None:
        """Reap what boxes left that were killed from outside; boxes themselves are finished."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._boxes:
                    return
                os.waitpid(ended.si_pid, 0)

    def _take_request(self) -> None:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_REQUEST, 1)
        except ConnectionResetError:
            text, descriptors = b"", []
        if not text:
            return self._stop()
        request, status = json.loads(text), socket.socket(fileno=descriptors[0])
        sizes = tuple(request["sizes"])
        try:
            self._hand_over(self._spare(sizes) or self._start(sizes), request, status)
            self._keep_spare(sizes)
        except OSError as error:
            tell(status, {"errors": f"{error.filename or 'fork'}: {error.strerror}"})
        return None

    def _hand_over(self, box: Box, request: dict[str, Any], status: socket.socket) -> None:
        """Give a box its limits, and its socket to the worker."""
        if box.group is not None:
            box.group.bound(request["group_bytes"], request["processes"])
        box.status, box.until = status, time.monotonic() + request["deadline_s"]
        self._waiting.register(status, selectors.EVENT_READ, lambda: self._dismiss(box, status))
        with contextlib.suppress(
            OSError
        ):  # the worker no longer wants it, which is noticed elsewhere
            socket.send_fds(status, [b"box"], [box.channel.fileno()])
        box.channel.close()

    def _spares(self) -> list[Box]:
        return [box for box in self._boxes.values() if box.status is None and not box.killed]

    def _spare(self, sizes: Sizes) -> Box | None:
        return next((box for box in self._spares() if box.sizes == sizes), None)

    def _keep_spare(self, sizes: Sizes) -> None:
        """Start a spare, in place of the oldest one if there are enough."""
        spares = self._spares()
        if len(spares) >= self._settings.spares:
            self._kill(spares[0])
        if self._settings.spares and self._free:
            self._start(sizes)

    def _start(self, sizes: Sizes) -> Box:
        """Start a box that waits for its command; raises OSError."""
        slot, group, keeper = self._free.pop(), None, os.getpid()
        errors = os.memfd_create("errors")
        ours, theirs = socket.socketpair()
        try:
            if self._groups is not None:
                group = self._groups.make()
            process = os.fork()
        except OSError:
            self._free.append(slot)
            os.close(errors)
            ours.close()
            raise
        else:
            if process == 0:
                own = self._settings
                become_box(
                    own.launcher,
                    own.libraries,
                    own.filter,
                    COMMANDS[own.launcher_name](own.root, own.filter, sizes),
                    (theirs.fileno(), errors),
                    None if self._uids is None else self._uids + slot,
                    group,
                    keeper,
                )
        finally:
            theirs.close()
        end = os.pidfd_open(process)
        box = Box(process, end, ours, errors, slot, group, sizes)
        self._boxes[process] = box
        self._waiting.register(end, selectors.EVENT_READ, lambda: self._finish(box))
        return box

    def _dismiss(self, box: Box, status: socket.socket) -> None:
        """End a box that the worker has left; one that has reported ends by itself."""
        try:
            said = status.recv(LONGEST_REQUEST)
        except ConnectionResetError:
            said = b""
        if said != REPORTED:
            return self._kill(box)
        self._waiting.unregister(status)
        box.until = time.monotonic() + LEAVE_S
        return None

    def _kill(self, box: Box) -> None:
        if box.status is not None:
            with contextlib.suppress(KeyError):
                self._waiting.unregister(box.status)
        box.killed = True
        os.kill(box.process, signal.SIGKILL)

    def _finish(self, box: Box) -> None:
        """Reap a box, remove what was its, and tell the worker how it ended."""
        _, status = os.waitpid(box.process, 0)
        kills = box.group.kills_for_memory() if box.group is not None else 0
        if box.group is not None:
            box.group.remove()
        report = {"status": status, "memory": kills, "late": box.until == LATE}
        for one in (box.end, box.status):
            with contextlib.suppress(KeyError):
                if one is not None:
                    self._waiting.unregister(one)
        if box.status is not None:
            tell(box.status, {**report, "errors": last_of(box.errors)})
        os.close(box.end)
        os.close(box.errors)
        box.channel.close()
        self._free.append(box.slot)
        del self._boxes[box.process]

    def _patience(self) -> float | None:
        first = min((box.until for box in self._boxes.values() if box.until > 0), default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _end_late_ones(self) -> None:
        for box in self._boxes.values():
            if 0 < box.until <= time.monotonic():
                box.until = LATE
                self._kill(box)


def dispatch(waiting: selectors.BaseSelector, patience: float | None) -> None:
    """Wait for what is registered, and call what belongs to it.

    A call may close what else is ready, and open something by the same number: that is not called.
    """
    for key, _ in waiting.select(patience):
        if waiting.get_map().get(key.fd) is key:
            key.data()


def groups_of(folders: dict[str, Any] | None) -> ControlGroups | None:
    """Return where groups of boxes are made."""
    if folders is None:
        return None
    from pathlib import Path

    return ControlGroups([Path(one) for one in folders["parents"]], folders["unified"])


def last_of(errors: int) -> str:
    """Return the end of what bubblewrap or the runner wrote."""
    size = os.lseek(errors, 0, os.SEEK_END)
    return os.pread(errors, MOST_ERRORS, max(0, size - MOST_ERRORS)).decode("utf-8", "replace")


def tell(status: socket.socket, report: dict[str, Any]) -> None:
    """Send the worker how a box ended, if it still wants to know."""
    with contextlib.suppress(OSError):
        status.send(json.dumps(report).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    status.close()


def main() -> None:
    """Serve the worker whose settings are the last argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    Keeper(Settings(**json.loads(sys.argv[-1]))).serve()
