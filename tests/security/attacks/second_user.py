"""What another user of the machine tries against a run; prints what it got, as one JSON object.

    python second_user.py UID FOLDER < {"unix": […], "tcp": […], "files": […], "pids": […]}

It drops its rights before the first attempt, once what it needs is imported: the interpreter may
not be readable to the user. FOLDER is its own, where what it makes the run execute leaves a file.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  imported now, since it cannot be later
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import attach_to_workers, context

PATIENCE_S = 5.0
ATTACH_S = 6.0
PATHS = ("/v1/tree", "/v1/root", "/v1/schema", "/api/query", "/SKILL.md", "/")
OF_A_PROCESS = ("environ", "maps", "mem", "stack", "syscall", "auxv", "cwd", "root", "fd")


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def connected(place: str | tuple[str, int], source: str | None = None) -> socket.socket:
    family = socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX
    line = socket.socket(family, socket.SOCK_STREAM)
    line.settimeout(PATIENCE_S)
    if source is not None:
        line.bind((source, 0))
    line.connect(place)
    return line


def own_address() -> str:
    """The address of this machine towards others, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            line.connect(("203.0.113.9", 9))
        except OSError:
            return "127.0.0.1"
        return str(line.getsockname()[0])


def stays_open(place: str | tuple[str, int], source: str | None = None) -> str | None:
    """Why a silent connection is not ended by the other side; None if it is, or never began."""
    try:
        with connected(place, source) as line:
            return f"sent {got!r}" if (got := line.recv(100)) else None
    except TimeoutError:
        return "waits for us"
    except OSError:
        return None


def http(place: tuple[str, int], request: str) -> str | None:
    """The beginning of an answer; None without one."""
    try:
        with connected(place) as line:
            line.sendall(request.encode())
            return line.recv(300).decode(errors="replace") or None
    except OSError:
        return None


def requests() -> Iterator[str]:
    host = "Host: 127.0.0.1\r\nConnection: close\r\n"
    for path in PATHS:
        yield f"GET {path} HTTP/1.1\r\n{host}\r\n"
    for path in ("/api/query", "/v1/query"):
        body = json.dumps({"sql": "SELECT 1"})
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        yield f"POST {path} HTTP/1.1\r\n{host}{length}\r\n{body}"


def asked(place: str) -> str | None:
    """An answer to a telemetry query; None without one."""
    try:
        with connected(place) as line:
            line.sendall(b'{"sql": "SELECT 1"}\n')
            return line.recv(300).decode(errors="replace") or None
    except OSError:
        return None


def opened(path: Path) -> str | None:
    """How a file can be opened; None if it cannot."""
    for flags, name in ((os.O_RDONLY, "read"), (os.O_WRONLY, "written")):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
        except OSError:
            continue
        return name
    return None


def entered(path: Path) -> str | None:
    """How a folder or a link of `/proc` can be used; None if it cannot."""
    try:
        return "listed" if path.is_dir() and any(path.iterdir()) else None
    except OSError:
        return None


def attach(address: str, sign: Path) -> None:
    """Have a Monarch host start a program as its owner, which leaves a file."""
    script = f"id > {sign}.part; mv {sign}.part {sign}"
    try:
        mesh = attach_to_workers(name="mine", workers=[address], ca="trust_all_connections")
        mesh.initialized.get(timeout=ATTACH_S)
        command = BootstrapCommand("/bin/sh", None, ["-c", script], {})
        mesh.spawn_procs(name="mine", bootstrap_command=command).initialized.get(timeout=ATTACH_S)
    except Exception as error:  # noqa: BLE001  whatever Monarch raises, the file tells
        sys.stderr.write(f"{address}: {type(error).__name__}: {error}\n"[:300])


def attached(names: list[str], folder: Path) -> dict[str, str | None]:
    """What was executed by the owner of each abstract socket; None where nothing was."""
    signs = {name: folder / f"executed{number}" for number, name in enumerate(names)}
    for name, sign in signs.items():
        attach(f"ipc://{name}", sign)
    return {name: sign.read_text() if sign.exists() else None for name, sign in signs.items()}


def all_attacks(given: dict[str, Any], folder: Path) -> dict[str, dict[str, str | None]]:
    """What each attempt got."""
    unix = ["\0" + name[1:] if name.startswith("@") else name for name in given["unix"]]
    tcp = [(host, port) for host, port in given["tcp"]]
    own = [Path(f"/proc/{pid}/{name}") for pid in given["pids"] for name in OF_A_PROCESS]
    files = [path for path in map(Path, given["files"]) if not stat.S_ISDIR(_mode(path))]
    outside = own_address()
    return {
        "silent": {repr(place): stays_open(place) for place in [*unix, *tcp]},
        "from outside": {repr(place): stays_open(place, outside) for place in tcp},
        "http": {f"{place} {ask[:40]!r}": http(place, ask) for place in tcp for ask in requests()},
        "sql": {place: asked(place) for place in unix},
        "files": {str(path): opened(path) for path in [*files, *own]},
        "folders": {str(path): entered(path) for path in [*map(Path, given["folders"]), *own]},
        "attached": attached([name for name in given["unix"] if name.startswith("@")], folder),
    }


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


if __name__ == "__main__":
    _given = json.load(sys.stdin)
    os.chdir(sys.argv[2])
    context()  # starts Monarch here, which imports more
    become(int(sys.argv[1]))
    _got = all_attacks(_given, Path(sys.argv[2]))
    print(json.dumps({kind: {k: v for k, v in all_.items() if v} for kind, all_ in _got.items()}))
    sys.stdout.flush()
    os._exit(0)
