"""Attempts to leave a box, or to find what is not for an agent.

Each exits with 0 if it got nowhere, or is ended by a limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from knowledge_attacks import KNOWLEDGE

# Numbers are those of the attack battery; system calls those of x86_64.
ATTEMPTS: Mapping[str, str] = {
    **KNOWLEDGE,
    "52 the gold in files, arguments or environments": """
import glob
for place in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try: text = open(place, "rb").read()
    except OSError: continue
    assert b"SEC" + b"RET" not in text and b"COMPOSER_" + b"MESH_" not in text, place
""",
    "53 the network by name, address and proxy": """
import os, socket, urllib.request
assert not [one for one in os.environ if "proxy" in one.lower()]
for try_ in (
    lambda: socket.getaddrinfo("pypi.org", 443),
    lambda: socket.create_connection(("1.1.1.1", 53), 2),
    lambda: socket.create_connection(("169.254.169.254", 80), 2),
    lambda: urllib.request.urlopen("http://10.0.0.1/", timeout=2),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)),
):
    try: try_()
    except OSError: continue
    raise SystemExit("reached the network")
assert [one.split(":")[0].strip() for one in open("/proc/net/dev").readlines()[2:]] == ["lo"]
""",
    "54 files of other sessions": """
import os
assert os.listdir("/tmp") == [] and os.listdir("/dev/shm") == [], os.listdir("/tmp")
""",
    "56 core_pattern and other switches of the kernel": """
import glob
for place in ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
              "/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/self/uid_map"]:
    try: open(place, "w").write("1")
    except OSError: continue
    raise SystemExit("wrote " + place)
assert not glob.glob("/sys/*")
""",
    "57 vsock": """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try: socket.socket(40, kind)
    except PermissionError: continue
    raise SystemExit("vsock")
""",
    "58 a user namespace by unshare, clone and clone3": """
import ctypes, errno, os, struct
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == -1
assert libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
arguments = ctypes.create_string_buffer(struct.pack("<QQQQQQQQ", 0x10000000, 0, 0, 0, 17, 0, 0, 0))
assert libc.syscall(435, arguments, 64) == -1 and ctypes.get_errno() == errno.ENOSYS
try: open("/proc/sys/user/max_user_namespaces", "w").write("1000")
except OSError: raise SystemExit(0)
raise SystemExit("raised the limit")
""",
    "59 io_uring": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(425, 8, ctypes.create_string_buffer(200)) == -1
""",
    "60 inherited descriptors, of all processes, and a way out by a folder": """
import os
for process in filter(str.isdigit, os.listdir("/proc")):
    for one in os.listdir(f"/proc/{process}/fd"):
        try: target = os.readlink(f"/proc/{process}/fd/{one}")
        except OSError: continue
        assert target[0] != "/" or target.startswith(("/dev/", "/proc", "/memfd:")), target
    root = os.stat(f"/proc/{process}/root/")
    assert (root.st_dev, root.st_ino) == (os.stat("/").st_dev, os.stat("/").st_ino)
try: os.open("/proc/1/cwd/../../../../etc/shadow", os.O_RDONLY)
except OSError: raise SystemExit(0)
raise SystemExit("left the root")
""",
    "61 processes of siblings": """
import os
names = [open(f"/proc/{one}/cmdline").read() for one in os.listdir("/proc") if one.isdigit()]
assert len(names) <= 4, names
""",
    "62 inodes": """
import os
made = 0
try:
    for made in range(2_000_000): os.close(os.open(f"/tmp/{made}", os.O_CREAT | os.O_WRONLY))
except OSError: pass
assert made < 2_000_000
""",
    "64 terminal input": """
import ctypes, fcntl, errno
for request in (0x5412, 0x541C, (1 << 32) | 0x5412):
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ioctl(0, ctypes.c_ulong(request), b"x") == -1
    assert ctypes.get_errno() == errno.EPERM, ctypes.get_errno()
try: open("/dev/tty")
except OSError: raise SystemExit(0)
raise SystemExit("has a terminal")
""",
    "65 control groups": """
import os
assert not os.path.exists("/sys")
assert all(line.endswith((":/", "::/")) for line in open("/proc/self/cgroup").read().split())
""",
    "address families with high bits": """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for family in (16, 17, 38, 40, 31, (1 << 32) | 16, (1 << 32) | 40):
    assert libc.syscall(41, ctypes.c_ulong(family), 3, 0) == -1, family
    assert ctypes.get_errno() == errno.EPERM, (family, ctypes.get_errno())
""",
    "system calls of 32 bits, not by syscall()": """
import ctypes, mmap, os
child = os.fork()
if child == 0:
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(0)
assert os.waitpid(child, 0)[1] != 0
""",
    "replace the interpreter, its library or bubblewrap": """
import os
for place in ("/usr/bin/python3.11", "/proc/self/exe", "/proc/1/exe", "/usr/lib/python3.11/os.py",
              "/usr/lib/composer-mesh/composer_mesh/mesh/sandboxes/runner.py", "/packages/new.py"):
    try: os.close(os.open(place, os.O_WRONLY | os.O_CREAT))
    except OSError: continue
    raise SystemExit("opened " + place)
""",
    "mount, pivot and remount": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(None, b"/", None, 32 | 0, None) == -1
assert libc.umount2(b"/proc", 2) == -1
assert libc.chroot(b"/w") == -1
assert libc.syscall(155, b"/w", b"/w") == -1
""",
    "trace, read and steal from processes": """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
for number, arguments in ((101, (16, parent, 0, 0)), (310, (parent, 0, 0, 0, 0, 0)),
                          (311, (parent, 0, 0, 0, 0, 0)), (438, (os.pidfd_open(parent), 0, 0))):
    assert libc.syscall(number, *arguments) == -1 and ctypes.get_errno() == errno.EPERM, number
""",
}
