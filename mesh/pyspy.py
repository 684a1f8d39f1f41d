"""Python stacks of this machine's processes, read from outside by py-spy.

A process answers nothing for it and may hang. Monarch's admin server can run py-spy too, but in
Monarch 0.7 it ends its own process, the controller, when a process answers it after 0.1 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from composer_mesh.mesh.processes import stands_still
from composer_mesh.mesh.programs import ProgramFailed, run

PYSPY = "PYSPY_BIN"
"""Environment variable with the path of py-spy."""
DUMP_S = 10.0
LONGEST_ERROR = 200
NOT_FOUND = (
    "py-spy was not found: pip install py-spy beside composer-mesh on this machine, or set "
    f"{PYSPY} to its path"
)

StackDump: TypeAlias = list[dict[str, Any]] | str
"""The threads of a process as py-spy lists them (`py-spy dump --json`), or why there are none."""


def find_pyspy() -> str | None:
    """Return the path of py-spy: of `PYSPY_BIN`, beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return os.environ.get(PYSPY) or (str(beside) if beside.exists() else shutil.which("py-spy"))


async def dump_stacks(
    pids: Sequence[int], native: bool = False, deadline_s: float = DUMP_S
) -> list[StackDump]:
    """Return the stacks of each process, in order. Waits for all, `deadline_s` for each at most.

    py-spy pauses a process while it reads. With `native` it also lists calls of C code.
    """
    program = find_pyspy()
    if program is None:
        return [NOT_FOUND for _ in pids]
    reading = (asyncio.to_thread(_dump, program, pid, native, deadline_s) for pid in pids)
    return list(await asyncio.gather(*reading))


def _dump(program: str, pid: int, native: bool, deadline_s: float) -> StackDump:
    command = [program, "dump", "--json", "--pid", str(pid)]
    if stands_still(pid):  # then py-spy cannot pause it
        if native:
            return "it is stopped, so calls of C code cannot be read: ask without --native"
        command.append("--nonblocking")
    elif native:
        command.append("--native")
    try:
        done = run(command, deadline_s=deadline_s, check=False)
    except ProgramFailed as error:
        return str(error)
    except OSError as error:
        return f"{program} cannot be started ({error.strerror}): {NOT_FOUND}"
    if done.status:
        return _cause(done.stderr) or f"py-spy ended with status {done.status}"
    threads: list[dict[str, Any]] = json.loads(done.stdout)
    return threads


def _cause(errors: str) -> str:
    """Return what py-spy says went wrong, without its own stack."""
    cause = errors.partition("Caused by:")[2] or errors
    lines = [line.strip().removeprefix("0: ").removeprefix("Error: ") for line in cause.split("\n")]
    return next((line[:LONGEST_ERROR] for line in lines if line), "")
