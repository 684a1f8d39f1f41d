"""An environment server and a client of it, against OpenEnv's own server and against a bare socket.

    python benchmarks/environments.py [--quick] [--sessions N] [--peer-python PATH]

Both servers serve the same echo, each with its best settings: OpenEnv's with an async environment
on a single thread (`REQUIRES_SINGLE_THREAD_EXECUTOR`) and two WebSocket libraries, of which the
better one counts; this one with `--processes`. A client opens sessions and steps each at a slow
pace; the memory of a server is that of its processes' own pages. Compared is the number of sessions
that the same memory holds, from the memory of each further one. A step is that of one session, by
the OpenEnv client and by a bare socket in turns, to a server that only parses and answers.

OpenEnv's package is in an environment of its own: make openenv.
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
from environments_steps import compared
from report import Report, arguments
from websockets.asyncio.client import ClientConnection, connect

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-openenv" / "bin" / "python"
TASK = f"{ROOT / 'benchmarks' / 'environments_echo.py'}:Echo"
PEER_SERVER = ROOT / "benchmarks" / "environments_peer.py"
PEER_LIBRARIES = ("websockets-sansio", "wsproto")
STEP_SERVER = ROOT / "benchmarks" / "environments_steps.py"
STEPS, QUICK_STEPS = 20_000, 5_000
AT_ONCE = 64
START_S = 120.0
OPEN_S = 600.0
FRAMES = {
    "reset": {"type": "reset", "data": {}},
    "step": {"type": "step", "data": {"message": "x"}},
}


@dataclass(frozen=True)
class Held:
    """Sessions that a server held: seconds to open them, its memory, and the latency of steps."""

    sessions: int
    open_s: float
    empty_mb: float
    full_mb: float
    p50_ms: float
    p99_ms: float

    @property
    def kb_each(self) -> float:
        """Memory of a session."""
        return (self.full_mb - self.empty_mb) * 1000 / self.sessions

    def within(self, memory_mb: float) -> float:
        """Sessions that this memory holds, from what each has taken."""
        return (memory_mb - self.empty_mb) * 1000 / self.kb_each


@contextmanager
def served(command: list[str], port: int) -> Iterator[psutil.Process]:
    """Run a server until it answers; end it afterwards."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tempfile.gettempdir())
        try:
            until = time.monotonic() + START_S
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"the server does not start: {log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def healthy(port: int) -> bool:
    """Whether a server answers."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def memory_mb(process: psutil.Process) -> float:
    """Memory of a server's processes, each its own."""
    processes = [process, *process.children(recursive=True)]
    return sum(one.memory_full_info().uss for one in processes) / 1e6


async def held(process: psutil.Process, port: int, sessions: int, seconds: float) -> Held:
    """Open sessions, and step each once while `seconds` go by."""
    empty = memory_mb(process)
    began = time.perf_counter()
    sockets: list[ClientConnection] = []
    turns = asyncio.Semaphore(AT_ONCE)
    try:
        async with asyncio.timeout(OPEN_S), asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(opened(port, sockets, turns))
        open_s = time.perf_counter() - began
        pace = seconds / sessions
        async with asyncio.TaskGroup() as group:
            steps = [
                group.create_task(stepped(socket, at * pace)) for at, socket in enumerate(sockets)
            ]
        times = sorted(one.result() for one in steps)
        full = memory_mb(process)
    finally:
        for socket in sockets:
            socket.transport.abort()
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return Held(sessions, open_s, empty, full, statistics.median(times) * 1e3, p99 * 1e3)


async def opened(port: int, sockets: list[ClientConnection], turns: asyncio.Semaphore) -> None:
    async with turns:
        address = f"ws://127.0.0.1:{port}/ws"
        socket = await connect(
            address, proxy=None, open_timeout=OPEN_S, ping_interval=None, compression=None
        )
        sockets.append(socket)
        await answered(socket, "reset")


async def stepped(socket: ClientConnection, after_s: float) -> float:
    await asyncio.sleep(after_s)
    began = time.perf_counter()
    await answered(socket, "step")
    return time.perf_counter() - began


async def answered(socket: ClientConnection, kind: str) -> None:
    await socket.send(json.dumps(FRAMES[kind]))
    reply = json.loads(await socket.recv())
    if reply["type"] != "observation":
        raise SystemExit(f"a {kind} was answered by {reply}")


def ours(port: int, processes: int, sessions: int) -> list[str]:
    """The command of this server."""
    words = [sys.executable, "-m", "composer_mesh", "serve-env", TASK, "--port", str(port)]
    bounds = ["--processes", str(processes), "--max-sessions", str(2 * sessions)]
    return [*words, *bounds, "--set", "environment.max_turns=1000"]


def theirs(python: Path, port: int, sessions: int, library: str) -> list[str]:
    """The command of OpenEnv's server with one of uvicorn's WebSocket libraries."""
    return [str(python), "-I", str(PEER_SERVER), str(port), str(2 * sessions), library]


def measured(command: list[str], port: int, sessions: int, seconds: float) -> Held:
    with served(command, port) as process:
        return asyncio.run(held(process, port, sessions, seconds))


def step_times(report: Report, port: int, steps: int) -> None:
    """Compare a step by the client with one by a bare socket."""
    with served([sys.executable, str(STEP_SERVER), str(port)], port):
        found = asyncio.run(compared(port, steps))
    report.figures |= {f"step/{name}_us": value for name, value in found.items()}
    report.ratios["step_over_socket"] = found["client"] / found["socket"]
    rows = [(name, f"{value:,.4g}") for name, value in found.items()]
    report.print_table("A step", ["side", "p50 us"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, metavar="N")
    parser.add_argument("--peer-sessions", type=int, default=9_500, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--port", type=int, default=8790, metavar="N")
    parser.add_argument("--peer-python", type=Path, default=PEER, metavar="PATH")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sessions = 500 if given.quick else given.sessions
    peer_sessions = 500 if given.quick else given.peer_sessions
    seconds = 5.0 if given.quick else 40.0
    report = Report("environments")
    own = measured(ours(given.port, given.processes, sessions), given.port, sessions, seconds)
    found = {"composer-mesh": own}
    if given.peer_python.exists():
        for at, library in enumerate(PEER_LIBRARIES, 1):
            command = theirs(given.peer_python, given.port + at, peer_sessions, library)
            peer = measured(command, given.port + at, peer_sessions, seconds)
            found[f"openenv/{library}"] = peer
        best = max(list(found.values())[1:], key=lambda peer: peer.within(own.full_mb))
        report.ratios["sessions_over_openenv"] = own.within(best.full_mb) / best.sessions
    else:
        report.missing["sessions_over_openenv"] = "OpenEnv is not installed: make openenv"
    step_times(report, given.port, QUICK_STEPS if given.quick else STEPS)
    rows = [
        (name, *(f"{one:,.4g}" for one in (*vars(it).values(), it.kb_each)))
        for name, it in found.items()
    ]
    columns = ["server", "sessions", "open s", "empty MB", "full MB", "p50 ms", "p99 ms", "KB each"]
    report.print_table("Sessions held", columns, rows)
    for name, it in found.items():
        report.figures |= {f"{name}/{key}": value for key, value in vars(it).items()}
    report.figures["processes"] = given.processes
    report.figures["cores"] = os.cpu_count() or 0
    report.finish(given.json)


if __name__ == "__main__":
    main()
