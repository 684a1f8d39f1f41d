"""What the probes try in a box: each attack as code of an agent would make it.

Run by the box's own interpreter with facts about the host as JSON in its first argument; prints
one JSON object with what each attack got. Imported nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER = 0x10000000
CALLS = {
    "x86_64": {"io_uring": 425, "userfaultfd": 323, "keyctl": 250, "bpf": 321, "pidfd_getfd": 438},
    "aarch64": {"io_uring": 425, "userfaultfd": 282, "keyctl": 219, "bpf": 280, "pidfd_getfd": 438},
}
ALLOWED_VARIABLES = {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
FACTS: dict[str, Any] = {}


def read_host_file() -> str:
    """Read a file that each user of the host may read."""
    return Path(FACTS["file"]).read_text()


def write_system() -> str:
    """Write where the interpreter imports from."""
    written = []
    for place in ("/", "/usr/lib", "/packages", "/usr/bin", "/etc", "/dev", "/proc"):
        with contextlib.suppress(OSError):
            Path(place, "sitecustomize.py").write_text("")
            written.append(place)
    return " ".join(written)


def tcp_to_host() -> str:
    """Connect to a server on the host's loopback."""
    socket.create_connection(("127.0.0.1", FACTS["tcp"]), 1).close()
    return "connected"


def udp_to_host() -> str:
    """Send a datagram to the host's loopback; whoever probes looks whether it came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"from the box", ("127.0.0.1", FACTS["udp"]))
    return ""


def abstract_socket() -> str:
    """Connect to a Unix socket that has no file."""
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("\0" + FACTS["abstract"])
    return "connected"


def other_families() -> str:
    """Open sockets that reach the hypervisor, the kernel's tables, raw packets and its ciphers."""
    got = []
    for name, family in (("vsock", 40), ("netlink", 16), ("packet", 17), ("alg", 38)):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM):
            got.append(name)
    return " ".join(got)


def host_processes() -> str:
    """See processes of the host, or signal one."""
    seen = [one for one in os.listdir("/proc") if one.isdigit()]  # noqa: PTH208
    return f"sees {len(seen)} processes" if len(seen) > 5 else ""


def core_pattern() -> str:
    """Name a program that the kernel runs with all rights when a process crashes."""
    file = Path("/proc/sys/kernel/core_pattern")
    file.write_text(file.read_text())
    return "written"


def control_groups() -> str:
    """Reach the host's control groups."""
    return " ".join(line for line in Path("/proc/mounts").read_text().split() if "cgroup" in line)


def become_root() -> str:
    """Become another user."""
    os.setuid(0)
    return "uid 0"


def make_device() -> str:
    """Make a device file of a disk."""
    os.mknod("/w/disk", 0o60600, os.makedev(8, 0))
    return "made"


def mount_something() -> str:
    """Mount a file system."""
    return called(LIBC.mount(b"none", b"/w", b"tmpfs", 0, None))


def user_namespace() -> str:
    """Become root of a new user namespace."""
    return called(LIBC.unshare(NEW_USER))


def trace_first_process() -> str:
    """Attach to the first process of the box."""
    return called(LIBC.ptrace(16, 1, None, None))


def kernel_log() -> str:
    """Read the kernel's log."""
    return called(LIBC.klogctl(10, None, 0))


def kernel_interfaces() -> str:
    """Reach parts of the kernel that tests do not need and exploits do."""
    numbers = CALLS.get(platform.machine(), {})
    got = [name for name, number in numbers.items() if passed(LIBC.syscall(number, 0, 0, 0, 0, 0))]
    return " ".join(got)


def terminal_input() -> str:
    """Type into the terminal of who started the run."""
    try:
        fcntl.ioctl(0, 0x5412, b"x")
    except OSError as error:
        return "" if error.errno == errno.EPERM else f"errno {error.errno}"
    return "typed"


def inherited_files() -> str:
    """Find open files of the host, in this process or the others."""
    got = []
    for process in ("1", "2", "self"):
        for one in Path("/proc", process, "fd").iterdir():
            with contextlib.suppress(OSError):
                target = one.readlink().as_posix()
                if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/memfd:")):
                    got.append(target)
    return " ".join(got)


def environment_secrets() -> str:
    """Find variables of whoever started the run."""
    others = set(os.environ)
    with contextlib.suppress(OSError):
        first = Path("/proc/1/environ").read_bytes().split(b"\0")
        others |= {one.partition(b"=")[0].decode() for one in first if one}
    return " ".join(sorted(others - ALLOWED_VARIABLES - {"PWD", "LC_CTYPE", "LD_LIBRARY_PATH"}))


def passed(result: int) -> bool:
    """Whether a system call was not refused by the filter."""
    return result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)


def called(result: int) -> str:
    """Return what a system call got."""
    return f"result {result}, errno {ctypes.get_errno()}" if passed(result) else ""


ATTACKS: tuple[Callable[[], str], ...] = (
    *(read_host_file, write_system, tcp_to_host, udp_to_host, abstract_socket, other_families),
    *(host_processes, core_pattern, control_groups, become_root, make_device, mount_something),
    *(user_namespace, trace_first_process, kernel_log, kernel_interfaces, terminal_input),
    *(inherited_files, environment_secrets),
)


def tried(attack: Callable[[], str]) -> str:
    """Return what an attack got; nothing if it was refused."""
    try:
        return attack()
    except OSError:
        return ""


def main() -> None:
    """Try all attacks."""
    FACTS.update(json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps({one.__name__: tried(one) for one in ATTACKS}))


if __name__ == "__main__":
    main()
