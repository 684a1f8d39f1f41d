"""What a forked keeper does to become a box: gives up its rights, and executes its launcher.

Imports only the standard library and `cgroups`.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from resource import RLIMIT_CORE, setrlimit
from signal import SIGKILL

from composer_mesh.mesh.sandboxes.cgroups import BoxGroup

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
