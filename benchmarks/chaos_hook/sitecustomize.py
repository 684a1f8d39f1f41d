"""Fault injection inside actor processes for chaos runs, without any hook in the package.

Python imports this module at start wherever its folder is on PYTHONPATH; only `chaos.py` puts it
there. A process of the mesh listens on a socket for faults from its import of Monarch on, which a
fork does after its fork. Any other process does nothing.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

CHILD, FORK_SERVER = "composer_mesh.mesh.bootstrap", "composer_mesh.mesh.fork_server.server"
ENDPOINTS = "monarch.actor"
FOLDER_ENV = "COMPOSER_MESH_CHAOS_FOLDER"
EXIT_STATUS = 7
SQUEEZE_S = 3.0
TOO_MUCH = 256 << 20
"""Bytes that are allocated under the memory limit; they never fit."""


class Faults:
    """The faults armed for endpoints of this process, and how each is injected."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._armed: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def listen(self) -> None:
        """Open the socket now, and read from it in a thread."""
        self._socket.bind(str(self._folder / f"{os.getpid()}.sock"))
        threading.Thread(target=self._hear, daemon=True).start()

    def enter(self, endpoint: str) -> None:
        """Called at the entry of every endpoint, on its thread; raises the injected exception."""
        if not self._armed:
            return
        for fault in list(self._armed):
            if time.time() > fault["until"]:
                self._armed.remove(fault)
            elif _strikes(fault["endpoint"], endpoint):
                self._armed.remove(fault)
                self._do(fault, endpoint)

    def _hear(self) -> None:
        while True:
            fault = json.loads(self._socket.recv(4096))
            if fault["endpoint"] is None:
                self._do(fault, "")
            else:
                self._armed.append(fault)

    def _do(self, fault: dict[str, Any], endpoint: str) -> None:
        self._tell(fault["number"], endpoint)
        match fault["fault"]:
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "os._exit":
                os._exit(EXIT_STATUS)
            case "exception":
                raise RuntimeError(f"injected fault {fault['number']}: in {endpoint}")
            case "memory limit":
                _exhaust_memory(fault["number"])
            case "cut connection":
                _cut_connections(self._socket.fileno())

    def _tell(self, number: int, endpoint: str) -> None:
        """Write one line to the ledger shared by all processes, before the fault is injected."""
        line = {
            "number": number,
            "time": time.time(),
            "actor": self._name,
            "pid": os.getpid(),
            "endpoint": endpoint,
        }
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        ledger = os.open(self._folder / "applied.jsonl", flags, 0o600)
        os.write(ledger, json.dumps(line).encode() + b"\n")
        os.close(ledger)


def _strikes(wanted: str, endpoint: str) -> bool:
    """Whether a fault applies: `*` is any endpoint but `describe`, which is called constantly."""
    return endpoint == wanted or (wanted == "*" and endpoint != "describe")


def _exhaust_memory(number: int) -> None:
    """Prevent this process from growing for a while, and allocate at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    lift = threading.Timer(SQUEEZE_S, resource.setrlimit, (resource.RLIMIT_AS, before))
    lift.daemon = True
    lift.start()
    limit = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        mmap.mmap(-1, TOO_MUCH).close()
    except OSError as error:
        raise MemoryError(f"injected fault {number}: {error}") from error


def _cut_connections(own: int) -> None:
    """Shut down every connection of this process to another; listening sockets stay open."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            descriptor = int(entry.name)
            if descriptor == own or not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.getpeername() or end.getsockname():  # not a socket pair within the process
                    end.shutdown(socket.SHUT_RDWR)


class _WhenImported(MetaPathFinder):
    """Hooks the endpoints of every actor defined from here on, so that they call `Faults.enter`.

    An endpoint is hooked before Monarch wraps it: an exception then reaches its caller unmodified.
    """

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != ENDPOINTS or not os.environ.get(FOLDER_ENV):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module
        faults = Faults(sys.argv[1], Path(os.environ[FOLDER_ENV]))
        faults.listen()

        def exec_module(module: Any) -> None:
            run(module)
            module.concurrent_endpoint = hooking(module.concurrent_endpoint, faults)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def hooking(decorate: Any, faults: Faults) -> Any:
    """Return the endpoint decorator with a check for faults before each call.

    The hooked endpoint has no `__wrapped__`, so that calls in batches, which undo Monarch's own
    wrapper with `inspect.unwrap`, find the check too.
    """

    def hooked(method: Any = None, **options: Any) -> Any:
        if method is None:
            return functools.partial(hooked, **options)

        @functools.wraps(method)
        async def endpoint(*args: Any, **kwargs: Any) -> Any:
            faults.enter(method.__name__)
            return await method(*args, **kwargs)

        del endpoint.__wrapped__
        endpoint.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return decorate(endpoint, **options)

    return hooked


if {CHILD, FORK_SERVER}.intersection(sys.orig_argv):
    sys.meta_path.insert(0, _WhenImported())
