"""What a forked keeper does to become a box: gives up its rights, and executes its launcher.

Imports only the standard library and `cgroups`.

Control groups of boxes: bounds for the memory and the processes of all of a box together.

Speaks version 1 (own controllers `memory` and `pids`) and version 2. A group's name says whose it
is: the namespace, the process id and the start time of its keeper. A keeper removes a box's group
with the box; the next one removes those of keepers that are dead, and no others. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIMIT_CORE, setrlimit
from signal import SIGKILL

PREFIX = "composer-mesh-box"
OURS = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-\d+")
UNITS = {"memory", "pids"}
REMOVAL_TRIES = 250
REMOVAL_WAIT_S = 0.02
MORE_PROCESSES = 8
"""Of the box itself: bubblewrap twice, the runner, and what is about to be reaped."""


@dataclass
class BoxGroup:
    """The groups of one box, one for each hierarchy."""

    folders: Sequence[Path]
    unified: bool

    def bound(self, memory_bytes: int, processes: int) -> None:
        """Bound all processes of the box together."""
        limits = {"pids.max": processes + MORE_PROCESSES, "memory.swap.max": 0}
        names = V2_LIMITS if self.unified else V1_LIMITS
        limits |= dict.fromkeys(names, memory_bytes)
        for name, number in limits.items():
            for folder in self.folders:
                if (folder / name).exists():
                    (folder / name).write_text(str(number))

    def join(self) -> None:
        """Put this process into the groups."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def kills_for_memory(self) -> int:
        """Return how many processes the kernel killed because the memory was used up."""
        return sum(_count(folder / name) for folder in self.folders for name in COUNTERS)

    def remove(self) -> bool:
        """Kill the rest, remove the groups; return whether they are gone."""
        gone = [_remove(folder) for folder in self.folders]
        return all(gone)


COUNTERS = ("memory.oom_control", "memory.events")


@dataclass
class ControlGroups:
    """Where the groups of boxes are made: version 2, or one folder for each controller of 1."""

    parents: Sequence[Path]
    unified: bool
    owner: str = field(default_factory=lambda: owner_of(os.getpid()))
    _made: int = 0

    def make(self) -> BoxGroup:
        """Make the groups of a box; raises OSError."""
        self._made += 1
        name = f"{PREFIX}-{self.owner}-{self._made}"
        group = BoxGroup([parent / name for parent in self.parents], self.unified)
        try:
            for folder in group.folders:
                folder.mkdir()
        except OSError:
            group.remove()
            raise
        return group

    def remove_abandoned(self) -> list[Path]:
        """Remove the groups of keepers that are dead; return which."""
        found = [one for parent in self.parents for one in parent.glob(f"{PREFIX}-*")]
        return [one for one in found if is_abandoned(one.name) and _remove(one)]


V2_LIMITS = ("memory.max",)
V1_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")


def writable_groups(
    own: str | None = None, mounts: str | None = None
) -> tuple[ControlGroups | None, str]:
    """Return where groups can be made, or None and why not.

    `own` and `mounts` are the texts of /proc/self/cgroup and /proc/self/mounts.
    """
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    mounts = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    paths = dict(_own_groups(own))
    reasons = []
    for unified, parents in _candidates(paths, list(_mounted(mounts))):
        groups = ControlGroups(parents, unified)
        try:
            group = groups.make()
        except OSError as error:
            reasons.append(f"{error.filename or parents[0]}: {error.strerror}")
            continue
        whole = _bounds_both(group)
        group.remove()
        if whole:
            groups.remove_abandoned()
            return groups, "version 2" if unified else "version 1"
        reasons.append(f"{parents[0]}: the controllers memory and pids are not enabled there")
    return None, "; ".join(reasons) or "no cgroup controllers are mounted"


def owner_of(process: int) -> str:
    """Return the mark of a living process: its namespace, id and start time."""
    state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    if state in "XZ":
        raise ProcessLookupError(f"process {process} has ended")
    return f"{_namespace()}-{process}-{rest[18]}"


def is_abandoned(name: str) -> bool:
    """Whether a group is of a dead keeper in this process's own namespace."""
    found = OURS.fullmatch(name)
    if found is None or int(found[1]) != _namespace():
        return False
    try:
        return owner_of(int(found[2])) != "-".join(found.groups())
    except OSError:
        return True


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _own_groups(text: str) -> Iterator[tuple[str, str]]:
    """Yield each controller ("" for version 2) with this process's path in it."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for one in controllers.split(","):
            yield one, path


def _mounted(text: str) -> Iterator[tuple[str, Path, set[str]]]:
    for line in text.splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind in ("cgroup", "cgroup2"):
            yield kind, Path(place), set(options.split(","))


def _candidates(
    own: Mapping[str, str], mounted: Sequence[tuple[str, Path, set[str]]]
) -> Iterator[tuple[bool, list[Path]]]:
    first = {
        unit: place / own.get(unit, "/").lstrip("/")
        for unit in sorted(UNITS)
        for kind, place, options in mounted
        if kind == "cgroup" and unit in options
    }
    if first.keys() == UNITS:
        yield False, list(dict.fromkeys(first.values()))
    for kind, place, _ in mounted:
        if kind == "cgroup2":
            here = place / own.get("", "/").lstrip("/")
            yield True, [here]
            if here != place:  # a group with processes has no bounded groups in it
                yield True, [here.parent]


def _bounds_both(group: BoxGroup) -> bool:
    files = {one.name for folder in group.folders for one in folder.iterdir()}
    return "pids.max" in files and bool(files & {"memory.max", "memory.limit_in_bytes"})


def _count(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _remove(folder: Path) -> bool:
    for _ in range(REMOVAL_TRIES):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            _kill_members(folder)
            time.sleep(REMOVAL_WAIT_S)
        else:
            return True
    return False


def _kill_members(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for line in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)


UIDS_A_KEEPER = 64
UID_BLOCKS = 900
INNER_UID = "1000"
PR_SET_PDEATHSIG = 1
NOT_STARTED = 125
SIZED = ("/w", "/tmp", "/dev/shm")
Sizes = tuple[int, ...]
"""Bytes of the folders in `SIZED`."""


def become_box(
    launcher: int,
    libraries: int | None,
    rules: int,
    command: list[str],
    streams: tuple[int, int],
    uid: int | None,
    group: BoxGroup | None,
    keeper: int,
) -> None:
    """Become a launcher, with a socket and a file for its errors; never returns.

    It ends with the process `keeper`, whose child this one is. `launcher`, `libraries` and `rules`
    are descriptors: a user may be unable to reach their paths.
    """
    try:
        if group is not None:
            group.join()
        os.dup2(streams[0], 0)
        os.dup2(streams[1], 1)
        os.dup2(streams[1], 2)
        # An own open file: the shared one is read to its end by the first box.
        os.dup2(os.open(f"/proc/self/fd/{rules}", os.O_RDONLY), rules)
        inherited = {0, 1, 2, rules} if libraries is None else {0, 1, 2, rules, libraries}
        close_all_but(sorted({*inherited, launcher}))
        for one in inherited:
            os.set_inheritable(one, True)
        os.set_inheritable(launcher, False)
        setrlimit(RLIMIT_CORE, (0, 0))
        os.setsid()
        if uid is not None:
            give_up_rights(uid)
        die_with_parent(keeper)
        os.execve(launcher, command, {} if libraries is None else library_path(libraries))
    except BaseException as error:  # noqa: BLE001 a forked child must not return
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(NOT_STARTED)


def bubblewrap_command(root: str, rules: int, sizes: Sizes) -> list[str]:
    """Return bubblewrap's arguments for a box with sized folders that can be written."""
    sized = [
        part
        for place, size in zip(SIZED, sizes, strict=True)
        for part in ("--size", str(size), "--tmpfs", place)
    ]
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "box"),
        *("--uid", INNER_UID, "--gid", INNER_UID, "--ro-bind", root, "/"),
        *("--proc", "/proc", "--dev", "/dev", *sized),
        *("--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/"),
        *("--chdir", "/w", "--seccomp", str(rules), "--", *runner_command("")),
    ]


def nsjail_command(root: str, rules: int, sizes: Sizes) -> list[str]:
    """Return nsjail's arguments for such a box, in which the runner loads the filter.

    nsjail takes filters in a language of its own only.
    """
    sized = [
        part
        for place, size in zip(SIZED, sizes, strict=True)
        for part in ("--mount", f"none:{place}:tmpfs:size={size}")
    ]
    devices = [part for one in DEVICES for part in ("--bindmount", one)]
    return [
        *("nsjail", "--mode", "o", "--quiet", "--disable_rlimits", "--time_limit", "0"),
        *("--user", INNER_UID, "--group", INNER_UID, "--hostname", "box", "--chroot", root),
        *(*devices, *sized, "--cwd", "/w", "--pass_fd", str(rules)),
        *("--", *runner_command(str(rules))),
    ]


COMMANDS = {"bubblewrap": bubblewrap_command, "nsjail": nsjail_command}
"""How each launcher is called, with a root, the descriptor of a filter, and sizes of folders."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def runner_command(rules: str) -> list[str]:
    """Return the command of the runner; it loads the filter of a descriptor, if one is given."""
    return [
        *("/usr/bin/python3", "-I", "-S", "-c"),
        "import sys; sys.path.insert(0, '/usr/lib/composer-mesh'); "
        f"from composer_mesh.mesh.sandboxes.runner import main; main({rules})",
    ]


def die_with_parent(parent: int) -> None:
    """End this process, and what it executes, when the keeper ends, or if it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the kernel sends the signal to those that ask in time
        os._exit(NOT_STARTED)


def claimed_uids(first: int | None) -> tuple[int | None, socket.socket | None]:
    """Return the first of some user ids that no other keeper uses, and what holds them.

    None where this process may not change its user. The holder is a name that the kernel frees
    with this process.
    """
    if first is None:
        return None, None
    for block in range(UID_BLOCKS):
        uid = first + block * UIDS_A_KEEPER
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0composer-mesh-uids-{uid}")
        except OSError:
            holder.close()
            continue
        return uid, holder
    raise RuntimeError(f"all {UID_BLOCKS} blocks of user ids from {first} on are in use")


def library_path(folder: int) -> dict[str, str]:
    """Return the environment by which bubblewrap finds libraries below an unreadable path."""
    return {"LD_LIBRARY_PATH": f"/proc/self/fd/{folder}"}


def give_up_rights(uid: int) -> None:
    """Become an unprivileged user with no other groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def close_all_but(kept: Sequence[int]) -> None:
    """Close all descriptors but these, which are sorted."""
    for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)
