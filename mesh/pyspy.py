"""Python stacks of this machine's processes, read from outside by py-spy.

A process answers nothing for it and may hang. Monarch's admin server can run py-spy too, but in
Monarch 0.7 it ends its own process, the controller, when a process answers it after 0.1 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from typing import Any, TypedDict

from composer_mesh.mesh.environment import PYSPY, program_next_to_python
from composer_mesh.mesh.processes import is_alive, stands_still
from composer_mesh.mesh.programs import ProgramFailed, ProgramNotStarted, run

DUMP_S, NATIVE_S = 10.0, 20.0
"""Longest run of py-spy; for calls of C code it reads the symbols of every library."""
LONGEST_ERROR = 200
NOT_FOUND = (
    "py-spy was not found: pip install py-spy next to composer-mesh on this machine, or set "
    f"{PYSPY} to its path"
)


class StackDump(TypedDict, total=False):
    """What py-spy listed of a process, or why it listed nothing.

    `threads` are those of `py-spy dump --json`; `note` tells what they lack, `error` why there are
    none. A plain mapping, since it is also an answer to another process.
    """

    threads: list[dict[str, Any]]
    note: str
    error: str


def find_pyspy() -> str | None:
    """Return the path of py-spy: of `PYSPY_BIN`, next to this Python, or on PATH."""
    return os.environ.get(PYSPY) or program_next_to_python("py-spy") or shutil.which("py-spy")


async def dump_stacks(pids: Sequence[int], native: bool = False) -> list[StackDump]:
    """Return the stacks of each process, in order. Waits for all, half a minute for each at most.

    py-spy pauses a process while it reads. With `native` it also lists calls of C code, where it
    can: a dump without them has a note.
    """
    program = find_pyspy()
    if program is None:
        return [{"error": NOT_FOUND} for _ in pids]
    reading = (asyncio.to_thread(_dump, program, pid, native) for pid in pids)
    return list(await asyncio.gather(*reading))


def _dump(program: str, pid: int, native: bool) -> StackDump:
    if not is_alive(pid):
        return {"error": f"process {pid} has ended"}
    stopped = stands_still(pid)  # then py-spy cannot pause it, and reads no calls of C code
    why = "it is stopped"
    if native and not stopped:
        found = _read(program, pid, ["--native"], NATIVE_S)
        if "threads" in found:
            return found
        why = found["error"]
    found = _read(program, pid, ["--nonblocking"] if stopped else [], DUMP_S)
    if native and "error" not in found:
        found["note"] = f"no calls of C code: {why}"
    return found


def _read(program: str, pid: int, options: Sequence[str], deadline_s: float) -> StackDump:
    command = [program, "dump", "--json", "--pid", str(pid), *options]
    try:
        done = run(command, deadline_s=deadline_s, check=False)
    except ProgramNotStarted as error:
        return {"error": f"{program}: {error.said}. {NOT_FOUND}"}
    except ProgramFailed as error:
        return {"error": str(error)}
    if done.status:
        return {"error": _cause(done.stderr) or f"py-spy ended with status {done.status}"}
    return {"threads": json.loads(done.stdout)}


def _cause(errors: str) -> str:
    """Return what py-spy says went wrong, without its own stack."""
    cause = errors.partition("Caused by:")[2] or errors
    lines = [line.strip().removeprefix("0: ").removeprefix("Error: ") for line in cause.split("\n")]
    return next((line[:LONGEST_ERROR] for line in lines if line), "")
