"""The system calls that no box has: a filter for the kernel, as bytes that bubblewrap loads.

A deny list: what Python programs and their tests need stays. Calls of another architecture kill.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import termios
from types import ModuleType
from typing import Any

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
