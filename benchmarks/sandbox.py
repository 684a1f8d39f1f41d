"""What a box costs: time added to a command, episodes a second, memory of sessions, left-overs.

    python benchmarks/sandbox.py --json sandbox.json

`added_ms_per_command` is the median of a command in a box less that of the same command as a bare
process, ten of each in a row in turns (bar 40 ms). An episode here is four commands of a small
session, two of them runs of pytest. `left_over` counts the processes, control
groups and folders that are left when a worker with open boxes gets SIGKILL (bar 0).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from statistics import median

import psutil
from report import Report, arguments

from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.programs import PACKAGES
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.tasks.sandbox import FileTree, Sandbox, SandboxLimits, SandboxSession

BAR_MS = 40.0
COMMAND = ["-I", "-S", "-c", "pass"]
IN_A_ROW = 10
SESSIONS = 5_000
BASE = {f"lib/module_{place}.py": b"x = 1\n" * 500 for place in range(60)}
TESTS = {
    "lib/__init__.py": b"",
    "lib/one.py": b"def one():\n    return 2\n",
    "test_one.py": b"from lib.one import one\n\ndef test_one():\n    assert one() == 1\n",
}
PYTEST = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
USERS = 800_000
WORKER = """
import asyncio, sys
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.tasks.sandbox import FileTree
async def main():
    boxes = Boxes(boxes=2, packages=(), first_uid=int(sys.argv[1]))
    await boxes.run(FileTree({}), ["true"])
    print(boxes.keeper, boxes.folder, flush=True)
    await asyncio.gather(*(boxes.run(FileTree({}), ["sleep", "600"]) for _ in range(2)))
asyncio.run(main())
"""


async def added_ms(boxes: Sandbox, rounds: int) -> dict[str, float]:
    """Return the medians of a command in a box and bare, and their difference.

    Ten of a kind run in a row, so that the spare for the next box starts at the cost of a box. A
    cold box is one for which no spare of its sizes was there.
    """
    tree = FileTree(BASE)
    times: dict[str, list[float]] = {"boxed": [], "bare": [], "cold": []}
    limits = SandboxLimits()

    async def boxed(kind: str) -> None:
        began = time.perf_counter()
        result = await boxes.run(tree, ["python3", *COMMAND], limits=limits)
        times[kind].append(time.perf_counter() - began)
        assert result.exit_code == 0, result

    await boxed("cold")
    for turn in range(rounds):
        for _ in range(IN_A_ROW):
            await boxed("boxed")
        for _ in range(IN_A_ROW):
            began = time.perf_counter()
            await asyncio.to_thread(subprocess.run, [sys.executable, *COMMAND], check=True)
            times["bare"].append(time.perf_counter() - began)
        limits = SandboxLimits(disk_bytes=limits.disk_bytes + (1 << 20) * (turn + 1))
        await boxed("cold")
    found = {f"{kind}_ms": median(seconds) * 1000 for kind, seconds in times.items()}
    return {**found, "added_ms": found["boxed_ms"] - found["bare_ms"]}


async def episode(boxes: Sandbox) -> None:
    """Play an episode: look, test, edit, test."""
    session = SandboxSession(boxes, FileTree({**BASE, **TESTS}))
    assert (await session.exec(["grep", "-rn", "one", "lib"])).exit_code == 0
    assert (await session.exec(PYTEST)).exit_code == 1
    session.write("lib/one.py", b"def one():\n    return 1\n")
    assert (await session.exec(["python3", "-c", "import lib.one"])).exit_code == 0
    assert (await session.exec(PYTEST)).exit_code == 0


async def episodes_per_s(boxes: Sandbox, count: int) -> float:
    """Return the episodes a second when all are played at once."""
    began = time.perf_counter()
    await asyncio.gather(*(episode(boxes) for _ in range(count)))
    return count / (time.perf_counter() - began)


def session_bytes(boxes: Sandbox) -> float:
    """Return what an open session with an edit takes, besides the tree that all share."""
    tree = FileTree({**BASE, **TESTS})
    tracemalloc.start()
    sessions = [SandboxSession(boxes, tree) for _ in range(SESSIONS)]
    for place, session in enumerate(sessions):
        session.write("lib/one.py", b"def one():\n    return %d\n" % place)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(sessions)


def left_over() -> tuple[int, float]:
    """Kill a worker with open boxes; return what remains when its keeper has ended, and when."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-c", WORKER, str(USERS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        keeper, folder = worker.stdout.readline().decode().split()
        while processes_of(USERS) < 3:
            time.sleep(0.01)
        worker.kill()
    began = time.perf_counter()
    while is_alive(int(keeper)):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    groups = sum(
        f"-{keeper}-" in name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names
    )
    return processes_of(USERS) + groups + Path(folder).exists(), seconds


def processes_of(first: int) -> int:
    """Return how many processes the users of a worker's boxes have."""
    found = [one.info for one in psutil.process_iter(["uids", "status"])]
    users = [one["uids"].real for one in found if one["status"] != psutil.STATUS_ZOMBIE]
    return sum(first <= user < first + 60_000 for user in users)


def main() -> int:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--bytecode", action="store_true", help="boxes have the library's bytecode")
    options = parser.parse_args()
    report = Report("sandbox")
    began = time.perf_counter()
    boxes = Boxes(boxes=2, bytecode=options.bytecode)
    opened = time.perf_counter() - began

    async def measured() -> dict[str, float]:
        times = await added_ms(boxes, 4 if options.quick else 20)
        rate = await episodes_per_s(boxes, 8 if options.quick else 60)
        used = session_bytes(boxes)
        await boxes.close()
        return {**times, "episodes_per_s": rate, "session_bytes": used}

    found = asyncio.run(measured())
    left, seconds = left_over() if os.geteuid() == 0 else (-1, 0.0)
    rows = [
        ("a command bare, p50", f"{found['bare_ms']:.1f} ms"),
        ("the same in a box, p50", f"{found['boxed_ms']:.1f} ms"),
        ("the same in a box that nobody started before, p50", f"{found['cold_ms']:.1f} ms"),
        ("episodes of 4 commands (2 pytest), 2 boxes at once", f"{found['episodes_per_s']:.2f} /s"),
        (
            f"{SESSIONS} open sessions with an edit each",
            f"{found['session_bytes'] * SESSIONS / 1e6:.1f} MB",
        ),
        ("open a sandbox (copy its root)", f"{opened:.2f} s"),
        ("after SIGKILL of the worker", f"{left} left after {seconds:.2f} s"),
    ]
    report.print_table("Boxes of bubblewrap", ("", ""), rows)
    report.figures = {
        **found,
        "sessions_mb": found["session_bytes"] * SESSIONS / 1e6,
        "open_s": opened,
        "ended_s": seconds,
        "groups": str(boxes.groups_told),
        "launcher": str(boxes.launcher),
    }
    report.ratios = {"added_ms_per_command": found["added_ms"], "left_over": float(left)}
    report.finish(options.json)
    if left < 0:
        print("left-overs are not counted without root: boxes have no users of their own then")
    return 0 if found["added_ms"] <= BAR_MS and left <= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
