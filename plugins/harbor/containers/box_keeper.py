"""The process that holds the containers of a worker, and ends them with it.

A worker has one keeper. For each container it forks and becomes bubblewrap, whose only process
pauses; for each command or request for files it forks a child that enters the container. So a
container costs little memory, and needs no program of its image. Containers end when their status
socket is closed, and with the worker, however that ends. Imports only the standard library and
its neighbours, before the first container: after that nothing is imported any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.mesh.hosts.process_lifetime import adopt_orphans
from composer_mesh.mesh.sandboxes.box_process import (
    BoxGroup,
    close_all_but,
    die_with_parent,
    library_path,
)
from composer_mesh.mesh.sandboxes.keeper import dispatch, groups_of, last_of, tell
from composer_mesh.plugins.harbor.containers.box_exec import (
    NOT_STARTED,
    Entered,
    join_namespaces,
    make_socket,
    new_user_namespace,
    run_command,
    write_maps,
)
from composer_mesh.plugins.harbor.containers.box_files import copy_outside, serve_files
from composer_mesh.plugins.harbor.containers.first_process import READY, program
from composer_mesh.plugins.harbor.images.trees import remove_tree

LONGEST_REQUEST = 1 << 16
MOST_DESCRIPTORS = 8
SHARED_MEMORY_BYTES = 64 << 20
"""Of /dev/shm, as elsewhere."""
INIT = "/dev/.init"


@dataclass
class KeeperSettings:
    """What a worker tells its keeper: descriptors that it inherited, and whose ids are used.

    The keeper removes `folder`, which holds the containers' files, when the worker is gone.
    """

    control: int
    launcher: int
    libraries: int | None
    filter: int
    folder: str
    first_id: int | None
    groups: dict[str, Any] | None


@dataclass
class KeptContainer:
    """A container: what it is made of, its launcher, and its first process once it is ready."""

    request: dict[str, Any]
    status: socket.socket
    group: BoxGroup | None
    launcher: int = 0
    ends: list[int] = field(default_factory=list)
    first: int | None = None
    process: int = 0
    """The id of its first process."""
    namespaces: list[int] = field(default_factory=list)
    """Open ones of users and of the network, if it shares them with other containers."""
    living: int = 0
    """How many of the two processes, its launcher and its first one, have not ended."""
    waits: socket.socket | None = None
    """Who waits for it to be ready again: a worker that has ended all of its processes."""
    restarts: bool = False


class ContainerKeeper:
    """Starts, enters and ends containers as its worker asks."""

    def __init__(self, settings: KeeperSettings) -> None:
        self._settings = settings
        self._control = socket.socket(fileno=settings.control)
        self._groups = groups_of(settings.groups)
        self._waiting = selectors.DefaultSelector()
        self._boxes: dict[str, KeptContainer] = {}
        self._children: set[int] = set()
        self._serving = True
        self._init = os.memfd_create("init")
        os.write(self._init, program())

    def serve(self) -> None:
        """Serve the worker until it is gone."""
        worker = os.pidfd_open(os.getppid())
        self._waiting.register(self._control, selectors.EVENT_READ, self._take_request)
        self._waiting.register(worker, selectors.EVENT_READ, self._stop)
        try:
            while self._serving:
                dispatch(self._waiting, None)
        finally:
            for box in self._boxes.values():
                kill(box)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0):
                    pass
            for box in self._boxes.values():
                if box.group is not None:
                    box.group.remove()
            remove_tree(self._settings.folder)

    def _stop(self) -> None:
        self._serving = False

    def _take_request(self) -> None:
        try:
            text, descriptors, _, _ = socket.recv_fds(
                self._control, LONGEST_REQUEST, MOST_DESCRIPTORS
            )
        except ConnectionResetError:
            text, descriptors = b"", []
        if not text:
            return self._stop()
        request, status = json.loads(text), socket.socket(fileno=descriptors.pop(0))
        try:
            getattr(self, f"_{request['do']}")(request, status, descriptors)
        except OSError as error:
            tell(status, {"errno": error.errno, "error": str(error)})
        finally:
            for one in descriptors:
                os.close(one)
        return None

    def _start(self, request: dict[str, Any], status: socket.socket, _: list[int]) -> None:
        """Start a container whose life is that of `status`."""
        group = None
        if self._groups is not None:
            group = self._groups.make()
            group.bound(request["memory_bytes"], request["processes"])
        box = self._boxes[request["name"]] = KeptContainer(request, status, group)
        try:
            if request["network_of"] is not None:
                box.namespaces = [os.dup(one) for one in self._shared(request["network_of"])]
            self._launch(box)
        except OSError:
            del self._boxes[request["name"]]
            close(box.namespaces)
            if group is not None:
                group.remove()
            raise
        self._waiting.register(status, selectors.EVENT_READ, lambda: self._end(box))

    def _shared(self, name: str) -> list[int]:
        """Return the namespaces that a container shares from now on; raises OSError.

        They outlive its processes, so it has the same ones after a restart.
        """
        box = self._boxes.get(name)
        if box is None or box.first is None or box.restarts or box.request["host_network"]:
            raise OSError(errno.ESRCH, f"container {name} has ended, or has no network of its own")
        if not box.namespaces:
            kinds = ("user", "net")
            opened = [os.open(f"/proc/{box.process}/ns/{one}", os.O_RDONLY) for one in kinds]
            box.namespaces = opened
            signal.pidfd_send_signal(box.first, 0)  # it was that process, and no later one
        return box.namespaces

    def _launch(self, box: KeptContainer) -> None:
        """Fork, and become bubblewrap in a new user namespace; wait for that only."""
        own, keeper = self._settings, os.getpid()
        errors = os.memfd_create("errors")
        pipes = [os.pipe() for _ in range(4)]
        (said, says), (announced, tells), (mapped, maps), (ready, readies) = pipes
        box.launcher = os.fork()
        if box.launcher == 0:
            _become_bubblewrap(
                own, box, keeper, (self._init, errors, says, tells), (readies, mapped)
            )
        for one in (says, tells, mapped, readies):
            os.close(one)
        end = os.pidfd_open(box.launcher)
        box.ends, box.living = [end, said, announced, errors], 1
        self._waiting.register(end, selectors.EVENT_READ, lambda: self._ended(box, end))
        self._waiting.register(said, selectors.EVENT_READ, lambda: self._ready(box))
        try:
            if os.read(ready, 1):
                write_maps(box.launcher, own.first_id)
                os.write(maps, b"g")
        except OSError as error:  # without its maps the child ends
            os.write(errors, f"the ids of a container cannot be mapped: {error}\n".encode())
        finally:
            os.close(ready)
            os.close(maps)

    def _ready(self, box: KeptContainer) -> None:
        """Note the first process, which has just spoken, or that it never will."""
        _, said, announced, _ = box.ends
        self._waiting.unregister(said)
        if os.read(said, 1) != READY:
            return  # its launcher ends, too
        box.process = json.loads(os.read(announced, LONGEST_REQUEST))["child-pid"]
        first = os.pidfd_open(box.process)
        box.first, box.living = first, box.living + 1
        self._waiting.register(first, selectors.EVENT_READ, lambda: self._ended(box, first))
        report = {"ready": True}
        if box.waits is not None:
            tell(box.waits, report)
            box.waits = None
        else:
            with contextlib.suppress(OSError):
                box.status.send(json.dumps(report).encode(), socket.MSG_NOSIGNAL)

    def _restart(self, request: dict[str, Any], status: socket.socket, _: list[int]) -> None:
        """End all processes of a container, and start it again on its files, with a network."""
        box = self._boxes.get(request["name"])
        if box is None or box.restarts or box.waits is not None:
            return tell(status, {"died": True})
        if box.namespaces and request["host_network"]:
            raise OSError(errno.EINVAL, "a container that shares its network keeps it")
        box.waits, box.restarts = status, True
        box.request["host_network"] = request["host_network"]
        kill(box)
        return None

    def _end(self, box: KeptContainer) -> None:
        self._waiting.unregister(box.status)
        box.restarts = False
        kill(box)

    def _ended(self, box: KeptContainer, end: int) -> None:
        """Note the end of a launcher, or that of a first process, which is that of all others."""
        self._waiting.unregister(end)
        box.living -= 1
        if not box.living:
            self._finish(box)
        elif end == box.ends[0]:
            kill(box)

    def _finish(self, box: KeptContainer) -> None:
        """Reap the processes of a container, and start it again if its worker wants that."""
        _, status = os.waitpid(box.launcher, 0)
        if box.first is not None:
            with contextlib.suppress(ChildProcessError):  # its launcher has reaped it
                os.waitid(os.P_PIDFD, box.first, os.WEXITED)
            box.ends.append(box.first)
            box.first = None
        errors = last_of(box.ends[3])
        with contextlib.suppress(KeyError):
            self._waiting.unregister(box.ends[1])
        close(box.ends)
        if box.restarts:
            box.restarts = False
            try:
                return self._launch(box)
            except OSError as error:
                errors = str(error)
        close(box.namespaces)
        if box.group is not None:
            box.group.remove()
        with contextlib.suppress(KeyError):
            self._waiting.unregister(box.status)
        report = {"ended": status, "error": errors.strip()}
        if box.waits is not None:
            tell(box.waits, report)
        tell(box.status, report)
        del self._boxes[box.request["name"]]
        return None

    def _exec(self, request: dict[str, Any], status: socket.socket, given: list[int]) -> None:
        job, *streams = given
        self._forked(request, status, lambda one: run_command(one, status, job, streams))

    def _socket(self, request: dict[str, Any], status: socket.socket, _: list[int]) -> None:
        self._forked(request, status, lambda one: make_socket(one, status))

    def _files(self, request: dict[str, Any], status: socket.socket, given: list[int]) -> None:
        self._forked(request, status, lambda one: serve_files(one, status, given[0]))

    def _copy(self, request: dict[str, Any], status: socket.socket, _: list[int]) -> None:
        keeper = os.getpid()
        source, target = request["source"], request["target"]
        self._fork(status, lambda: copy_outside(status, source, target, keeper))

    def _forked(
        self, request: dict[str, Any], status: socket.socket, serve: Callable[[Entered], None]
    ) -> None:
        """Fork a child that enters a container and reports on `status`."""
        box = self._boxes.get(request["name"])
        if box is None or box.first is None:
            return tell(status, {"died": True})
        own = self._settings
        entered = Entered(
            box.first,
            own.filter,
            own.first_id,
            not box.request["host_network"],
            box.group,
            os.getpid(),
        )
        self._fork(status, lambda: serve(entered))
        return None

    def _fork(self, status: socket.socket, serve: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            try:
                serve()
            finally:
                os._exit(NOT_STARTED)
        status.close()
        self._children.add(child)
        end = os.pidfd_open(child)
        self._waiting.register(end, selectors.EVENT_READ, lambda: self._reap(child, end))

    def _reap(self, child: int, end: int) -> None:
        os.waitpid(child, 0)
        self._children.discard(child)
        self._waiting.unregister(end)
        os.close(end)


def kill(box: KeptContainer) -> None:
    """End all processes of a container."""
    with contextlib.suppress(ProcessLookupError):
        if box.first is None:
            os.kill(box.launcher, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(box.first, signal.SIGKILL)


def close(descriptors: list[int]) -> None:
    """Close them all."""
    for one in descriptors:
        os.close(one)


def _become_bubblewrap(
    own: KeeperSettings,
    box: KeptContainer,
    keeper: int,
    passed: tuple[int, int, int, int],
    handshake: tuple[int, int],
) -> None:
    """Become the launcher of a container; never returns."""
    init, errors, says, tells = passed
    try:
        empty = os.open(os.devnull, os.O_RDONLY)
        for place, one in enumerate((empty, says, errors)):
            os.dup2(one, place)
        os.dup2(os.open(f"/proc/self/fd/{init}", os.O_RDONLY), init)  # a place of its own in it
        inherited = [init, tells, *([] if own.libraries is None else [own.libraries])]
        close_all_but(sorted({0, 1, 2, own.launcher, *inherited, *handshake, *box.namespaces}))
        os.setsid()
        if box.namespaces:
            join_namespaces(box.namespaces, own.first_id)
        else:
            new_user_namespace(own.first_id, *handshake)
        for one in handshake:
            os.close(one)
        die_with_parent(keeper)
        for one in inherited:
            os.set_inheritable(one, True)
        os.set_inheritable(own.launcher, False)
        libraries = {} if own.libraries is None else library_path(own.libraries)
        os.execve(own.launcher, bubblewrap_command(box, init, tells), libraries)
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(NOT_STARTED)


def bubblewrap_command(box: KeptContainer, init: int, tells: int) -> list[str]:
    """Return bubblewrap's arguments for a container whose one process pauses."""
    request = box.request
    has_network = request["host_network"] or box.namespaces
    if request["lowers"]:
        lowers = [part for one in request["lowers"] for part in ("--overlay-src", one)]
        root = [*lowers, "--overlay", request["upper"], request["work"], "/"]
    else:
        root = ["--bind", request["upper"], "/"]
    mounts = [part for host, path in request["mounts"] for part in ("--ro-bind", host, path)]
    return [
        *("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if has_network else ("--unshare-net",)),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "box"),
        *("--cap-drop", "ALL", "--clearenv", *root, "--proc", "/proc", "--dev", "/dev", *mounts),
        *("--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"),
        *("--perms", "0555", "--ro-bind-data", str(init), INIT),
        *("--info-fd", str(tells), "--", INIT),
    ]


def forget_imports() -> None:
    """Leave nothing from which a child in a container could import a stranger's module."""
    for found in (sys.path, sys.meta_path, sys.path_hooks):
        found.clear()
    sys.path_importer_cache.clear()


def main() -> None:
    """Serve the worker whose settings are the last argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keeper = ContainerKeeper(KeeperSettings(**json.loads(sys.argv[-1])))
    forget_imports()
    keeper.serve()
