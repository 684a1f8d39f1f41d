"""What forked children of the keeper do: become a container, or enter one for a request.

A child that enters has not executed anything yet: it is a copy of the keeper, so it may not be
looked into (`PR_SET_DUMPABLE`), holds no other container's files, and imports nothing any more.
Imports only the standard library and its neighbours.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import marshal
import os
import resource
import select
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from composer_mesh.mesh.sandboxes.box_process import (
    COUNTERS,
    BoxGroup,
    close_all_but,
    die_with_parent,
)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 4, 22, 24
SECCOMP_MODE_FILTER = 2
RULE_BYTES = 8
IDS = 65_536
CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 31})
"""Of root in a container: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
NET_BIND_SERVICE and SETFCAP, over its own files and processes only."""
MOST_CAPABILITIES = 64
MOST_ACCOUNT_BYTES = 1 << 20
NOT_FOUND, NOT_EXECUTED, NOT_STARTED = 127, 126, 125
DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KILL = b"kill"
"""What the worker says of a command whose time is over."""


class Refused(Exception):
    """A command that cannot be started as it was requested; the text is for its error stream."""


class UnmappedUser(Exception):
    """A user that this machine's user cannot be in a container."""


@dataclass(frozen=True)
class User:
    """Who a command runs as."""

    uid: int
    gid: int
    groups: Sequence[int]
    home: str


def new_user_namespace(first_id: int | None, ready: int, go: int) -> None:
    """Become root of a new user namespace, with all ids from `first_id` on or only this user's.

    The keeper writes the maps between a byte on `ready` and one on `go`.
    """
    _checked(_libc.unshare(NEWUSER), "unshare")
    os.write(ready, b"r")
    if not os.read(go, 1):
        os._exit(NOT_STARTED)
    if first_id is not None:
        os.setgroups([])
    become_root()


def join_namespaces(namespaces: Sequence[int], first_id: int | None) -> None:
    """Become root of another container's user namespace, in that container's network."""
    for one, kind in zip(namespaces, (NEWUSER, NEWNET), strict=True):
        _checked(_libc.setns(one, kind), "setns")
    if first_id is not None:
        os.setgroups([])
    become_root()


def become_root() -> None:
    """Become root of the user namespace that this process has entered."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def write_maps(process: int, first_id: int | None) -> None:
    """Map the ids of a process that has just made a user namespace; raises OSError."""
    uid, gid = (f"0 {first_id} {IDS}",) * 2
    if first_id is None:
        uid, gid = f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1"
        write_text(f"/proc/{process}/setgroups", "deny")
    write_text(f"/proc/{process}/uid_map", uid)
    write_text(f"/proc/{process}/gid_map", gid)


def write_text(path: str, text: str) -> None:
    """Write a file of the kernel in one call."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


@dataclass
class Entered:
    """What a child needs to enter a container: descriptors, and how much is shared with us.

    `process` is the pidfd of its first process; `rules` the filter of system calls.
    """

    process: int
    rules: int
    first_id: int | None
    own_network: bool
    group: BoxGroup | None
    keeper: int


def run_command(entered: Entered, status: socket.socket, job_file: int, streams: list[int]) -> None:
    """Run a command in a container and report its end; never returns."""
    try:
        job = marshal.loads(contents(job_file))
        counters, procs = _group_files(entered.group)
        kept = [status.fileno(), entered.process, entered.rules, *streams, *counters, *procs]
        close_all_but(sorted({0, 1, 2, *kept}))
        before = _kills(counters)
        enter(entered, processes=True)
        child = os.fork()
        if child == 0:
            _become_command(entered, job, streams, procs)
        for one in streams:
            os.close(one)
        wait_status = _waited(child, status)
        report: dict[str, Any] = {"exit": wait_status, "memory": _kills(counters) - before}
        if os.WIFSIGNALED(wait_status) and has_died(entered):
            report = {"died": True}
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        report = failure(error, entered)
    finish(status, report)


def make_socket(entered: Entered, status: socket.socket) -> NoReturn:
    """Report a socket of a container's network, not yet bound or connected; never returns."""
    try:
        close_all_but(sorted({0, 1, 2, status.fileno(), entered.process}))
        enter(entered, processes=True)
        with socket.socket() as made:
            socket.send_fds(status, [b'{"made": true}'], [made.fileno()])
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        finish(status, failure(error, entered))
    os._exit(0)


def has_died(entered: Entered) -> bool:
    """Whether the first process of a container has ended, or is about to and ends all others."""
    return _libc.setns(entered.process, NEWUTS) != 0 and ctypes.get_errno() == errno.ESRCH


def failure(error: BaseException, entered: Entered | None = None) -> dict[str, Any]:
    """Return what is reported of an error of ours; a container that died is the cause of any."""
    if isinstance(error, UnmappedUser):
        return {"unsupported": str(error)}
    if entered is not None and has_died(entered):
        return {"died": True}
    number = error.errno if isinstance(error, OSError) else None
    return {"errno": number, "error": f"{type(error).__name__}: {error}"}


def finish(status: socket.socket, report: Mapping[str, Any]) -> NoReturn:
    """Report and end this child."""
    with contextlib.suppress(OSError):
        status.send(json.dumps(report).encode(), socket.MSG_NOSIGNAL)
    os._exit(0)


def enter(entered: Entered, processes: bool) -> None:
    """Enter the namespaces of a container as its root; raises OSError."""
    _checked(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    flags = NEWUSER | NEWNS
    if processes:
        flags |= NEWPID | NEWIPC | NEWUTS | NEWCGROUP | (NEWNET if entered.own_network else 0)
    _checked(_libc.setns(entered.process, flags), "setns")
    if entered.first_id is not None:
        os.setgroups([])
    become_root()
    die_with_parent(entered.keeper)  # after the change of user, which revokes it
    os.umask(0o022)


def _waited(child: int, status: socket.socket) -> int:
    """Return the wait status of a command; kill its process group where the worker says so."""
    end = os.pidfd_open(child)
    waiting = select.poll()
    for one in (end, status.fileno()):
        waiting.register(one, select.POLLIN)
    while True:
        ready = [one for one, _ in waiting.poll()]
        if status.fileno() in ready:
            waiting.unregister(status.fileno())
            with contextlib.suppress(OSError):  # unread bytes reset the socket
                status.recv(len(KILL))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # it may not lead its group yet
        if end in ready:
            return os.waitpid(child, 0)[1]


def _become_command(
    entered: Entered, job: Mapping[str, Any], streams: Sequence[int], procs: Sequence[int]
) -> NoReturn:
    """Become the command; what prevents it is written to its own error stream."""
    code = NOT_EXECUTED
    try:
        os.setsid()
        for place, descriptor in enumerate(streams):
            os.dup2(descriptor, place)
        for one in procs:
            os.write(one, b"0")
        user = looked_up(job["user"])
        if entered.first_id is None and (user.uid, user.gid) != (0, 0):
            raise Refused(only_root(job["user"]))
        _limit(job["limits"])
        _drop_rights(entered, user)
        try:
            os.chdir(job["workdir"])
        except OSError as error:
            raise Refused(f"{os.fsdecode(job['workdir'])}: {error.strerror}") from None
        environment = {b"HOME": os.fsencode(user.home), b"PATH": DEFAULT_PATH, **job["environment"]}
        os.closerange(3, 1 << 20)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(job["argv"][0], job["argv"], environment)
    except Refused as error:
        os.write(2, f"{error}\n".encode("utf-8", "replace"))
    except FileNotFoundError as error:
        code = NOT_FOUND
        os.write(2, job["argv"][0][:300] + f": {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    os._exit(code)


def only_root(user: str) -> str:
    """Return why a container of an unprivileged user has no other users."""
    return (
        f"user {user!r}: containers of an unprivileged user have no user but root; run as root, "
        "or use podman"
    )


def _limit(limits: Mapping[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, number in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        bound = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(kind, (bound, bound))


def _drop_rights(entered: Entered, user: User) -> None:
    """Keep the few rights of root in a container, load the filter, and become the user."""
    for number in range(MOST_CAPABILITIES):
        if number not in CAPABILITIES and _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # the kernel has no more of them
    load_filter(entered.rules)
    if entered.first_id is not None:
        os.setgroups(list(user.groups))
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def load_filter(rules: int) -> None:
    """Give this process and its children a filter of system calls."""

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    content = contents(rules)
    program = Program(len(content) // RULE_BYTES, content)
    reference = ctypes.byref(program)
    _checked(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, reference, 0, 0), "seccomp")


def looked_up(wanted: str) -> User:
    """Return a user such as `1000`, `agent` or `agent:users`, by the container's own files."""
    name, _, group = (wanted or "0").partition(":")
    name = "0" if name == "root" else name
    accounts = [line.split(":") for line in account_lines("/etc/passwd")]
    found = next((one for one in accounts if len(one) > 5 and _is(one, name)), None)
    if found is None and not name.isdigit():
        raise Refused(f"there is no user {name!r} in /etc/passwd")
    uid = int(found[2]) if found is not None else int(name)
    gid = 0 if found is None else int(found[3])
    groups = [line.split(":") for line in account_lines("/etc/group")]
    groups = [one for one in groups if len(one) > 3 and one[2].isdigit()]
    more = [int(one[2]) for one in groups if found is not None and found[0] in one[3].split(",")]
    if group:
        listed = next((one for one in groups if group in (one[0], one[2])), None)
        if listed is None and not group.isdigit():
            raise Refused(f"there is no group {group!r} in /etc/group")
        gid, more = int(group) if listed is None else int(listed[2]), []
    if max(uid, gid, *more, 0) >= IDS:
        raise Refused(f"user {wanted!r} has an id of {IDS:,} or more")
    return User(uid, gid, [gid, *more], "/" if found is None else found[5] or "/")


def _is(account: Sequence[str], name: str) -> bool:
    numbers = account[2].isdigit() and account[3].isdigit()
    return numbers and name in (account[0], account[2])


def account_lines(path: str) -> list[str]:
    """Return the lines of a file that a stranger may have replaced by anything."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return []
        return os.read(file, MOST_ACCOUNT_BYTES).decode("utf-8", "replace").splitlines()
    finally:
        os.close(file)


def contents(file: int) -> bytes:
    """Return all bytes of an open file, wherever it has been read to."""
    return os.pread(file, os.fstat(file).st_size, 0)


def _group_files(group: BoxGroup | None) -> tuple[list[int], list[int]]:
    """Open the counters of kills and the lists of members, which a container does not see."""
    counters, procs = [], []
    for folder in group.folders if group is not None else ():
        procs.append(os.open(folder / "cgroup.procs", os.O_WRONLY))
        for name in COUNTERS:
            with contextlib.suppress(FileNotFoundError):
                counters.append(os.open(folder / name, os.O_RDONLY))
    return counters, procs


def _kills(counters: Sequence[int]) -> int:
    lines = b"".join(os.pread(one, 4096, 0) for one in counters).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(b"oom_kill "))


def _checked(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)
