"""Tries real attacks on boxes before one is used, and says what holds on this machine.

Nothing is concluded from versions or settings: what counts is what an attack gets. Boxes that keep
something in are used; where one leaks, code of agents is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_mesh.mesh.sandboxes import attacks
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import MIB, FileTree, Sandbox, SandboxError, SandboxLimits

SMALL = SandboxLimits(wall_s=20.0, cpu_s=10, memory_bytes=256 * MIB, disk_bytes=8 * MIB)
ATTACKS = Path(attacks.__file__).read_text(encoding="utf-8")
SECRET = "a file that each user of this machine may read"
UNBOUNDED = "memory_of_all_processes"
"""What no box bounds where control groups cannot be written."""
EXHAUSTING = {
    "fork_bomb": """
import os, sys, time
made = 0
try:
    for made in range(300):
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    pass
sys.stdout.write(str(made))
""",
    "fill_the_disk": """
import os
size = 0
for folder in ("/w", "/tmp", "/dev/shm"):
    for name in range(1000):
        try:
            with open(f"{folder}/{name}", "wb", buffering=0) as file:
                size += file.write(bytes(1 << 20))
        except OSError:
            break
print(size)
""",
    UNBOUNDED: """
import os, sys
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        held = bytearray(os.urandom(1 << 20) * 100)
        os.read(0, 1)
        os._exit(0 if held else 1)
    children.append(child)
print(100 * sum(os.waitpid(one, 0)[1] == 0 for one in children))
""",
}
"""Programs that take what there is and print how much they got."""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    while True:
        open("late.txt", "a").write("x")
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class ProbeFinding:
    """What an attack got; nothing if it was held. `needed` ones refuse the sandbox."""

    attack: str
    got: str
    needed: bool = True

    def __str__(self) -> str:
        result = (
            "held" if not self.got else f"{'LEAKS' if self.needed else 'not bounded'}: {self.got}"
        )
        return f"{self.attack.replace('_', ' '):24} {result}"


class ProbedBoxes(Boxes):
    """Boxes that were attacked before their first use."""

    findings: Sequence[ProbeFinding] = ()

    def describe(self) -> Iterator[str]:
        """Yield lines: what boxes are, and what each probe found."""
        groups = self.groups_told if self.groups else f"none ({self.groups_told})"
        yield f"sandbox: {self.launcher}; a box runs as {self.runs_as}; cgroups: {groups}"
        for finding in self.findings:
            yield f"  {finding}"


def open_sandbox(**options: Any) -> ProbedBoxes:
    """Return a sandbox whose boxes hold; raises UnusableTask where they do not. Takes seconds."""
    sandbox = ProbedBoxes(**options)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop
        try:
            sandbox.findings = thread.submit(asyncio.run, probed(sandbox)).result()
            refuse_leaks(sandbox.findings)
        except BaseException as error:
            thread.submit(asyncio.run, sandbox.close()).result()
            if isinstance(error, SandboxError):
                raise UnusableTask(
                    f"no box can be made here: {error}. Boxes need user namespaces, which "
                    "containers and some systems forbid: allow them, or name a sandbox of your "
                    "own as environment.sandbox.kind"
                ) from error
            raise
    return sandbox


def refuse_leaks(findings: Sequence[ProbeFinding]) -> None:
    """Raise UnusableTask where a needed probe got something."""
    leaks = [f"{one.attack} ({one.got})" for one in findings if one.got and one.needed]
    if leaks:
        raise UnusableTask(
            f"boxes are not safe on this machine, so agents' code is not run: {'; '.join(leaks)}. "
            "Use another machine, or name a sandbox of your own as environment.sandbox.kind"
        )


async def probed(sandbox: Boxes) -> list[ProbeFinding]:
    """Return what attacks on boxes of a sandbox get."""
    with targets(sandbox.folder) as (facts, arrived):
        argv = ["python3", "-I", "-c", ATTACKS, json.dumps(facts)]
        result = await sandbox.run(FileTree({}), argv, limits=SMALL)
        try:
            got: dict[str, str] = json.loads(result.stdout)
        except ValueError:
            raise SandboxError(f"the probes did not end: {result.stderr[-500:]!r}") from None
        got["udp_to_host"] = arrived()
    return [
        *(ProbeFinding(one.__name__, str(got[one.__name__])) for one in attacks.ATTACKS),
        *await asyncio.gather(
            _exhausted(sandbox, "fork_bomb", SMALL.processes, "processes"),
            _exhausted(sandbox, "fill_the_disk", SMALL.disk_bytes + 2 * MIB, "bytes"),
            _exhausted(sandbox, UNBOUNDED, 300, "MiB by 4 processes, whose limit is 256"),
            _daemon(sandbox),
        ),
    ]


async def _exhausted(sandbox: Sandbox, attack: str, most: int, unit: str) -> ProbeFinding:
    result = await _run(sandbox, EXHAUSTING[attack])
    got = int(result.stdout or b"0")
    return ProbeFinding(attack, f"{got} {unit}" if got > most else "", attack != UNBOUNDED)


async def _daemon(sandbox: Sandbox) -> ProbeFinding:
    result = await _run(sandbox, DAEMON)
    return ProbeFinding("daemon", "" if result.ended == "exited" else f"the box {result.ended}")


async def _run(sandbox: Sandbox, source: str) -> Any:
    limits = replace(SMALL, processes=16)
    return await sandbox.run(FileTree({}), ["python3", "-I", "-c", source], limits=limits)


@contextlib.contextmanager
def targets(folder: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Make what boxes must not reach: a file, two servers, a socket; yield where, and a check."""
    name = f"composer-mesh-probe-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as opened:
        tcp = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        abstract = opened.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + name)
        abstract.listen()
        file = folder / name
        file.write_text(SECRET)
        file.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        opened.callback(os.unlink, file)

        def arrived() -> str:
            with contextlib.suppress(BlockingIOError):
                return f"received {udp.recv(100)!r}"
            return ""

        facts = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1], "abstract": name}
        yield {**facts, "file": str(file)}, arrived
