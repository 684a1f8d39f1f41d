"""Commands that inspect a live run: stacks, SQL queries and Monarch's TUI.

They read processes and servers of the run that are open to its owner only, and change nothing.

Python stacks of a process, parsed from py-spy's output and formatted for the terminal.

Pure; text is shown as plain text, never as markup or control codes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_mesh.mesh.admin import TlsFiles, open_tui
from composer_mesh.mesh.machine import NAME
from composer_mesh.mesh.processes import is_of_this_user, is_started_by
from composer_mesh.mesh.pyspy import StackDump, dump_stacks
from composer_mesh.services.directory.claim import holder
from composer_mesh.services.directory.control import ControlRefused, ask
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, live_run, status_of
from composer_mesh.services.inspection.page import plain_text


@dataclass(frozen=True)
class Thread:
    """A thread and its calls, innermost first."""

    id: int
    name: str
    active: bool
    holds_gil: bool
    frames: tuple[str, ...]


@dataclass(frozen=True)
class ProcessStacks:
    """A process and its threads, or the error why they could not be read.

    `note` tells what the threads lack.
    """

    process: str
    pid: int | None
    threads: tuple[Thread, ...] = ()
    error: str = ""
    note: str = ""


def read_pyspy(process: str, pid: int | None, dump: StackDump) -> ProcessStacks:
    """Parse what py-spy listed of a process; threads without a call are left out."""
    threads = tuple(_thread(one) for one in dump.get("threads", ()))
    called = tuple(one for one in threads if one.frames)
    return ProcessStacks(process, pid, called, dump.get("error", ""), dump.get("note", ""))


def _thread(about: dict[str, Any]) -> Thread:
    return Thread(
        id=about["os_thread_id"] or about["thread_id"],
        name=about["thread_name"] or "",
        active=about["active"],
        holds_gil=about["owns_gil"],
        frames=tuple(
            f"{one['name']} ({one['short_filename'] or one['filename']}:{one['line']})"
            for one in about["frames"]
        ),
    )


def stack_lines(stacks: ProcessStacks, idle: bool = False) -> Iterator[Text]:
    """Format the stacks of a process as terminal lines; `idle` threads are counted if not shown."""
    pid = "" if stacks.pid is None else f"  pid {stacks.pid}"
    yield Text.assemble((plain_text(stacks.process), "bold"), pid)
    if about := stacks.error or stacks.note:
        yield Text(f"  {plain_text(about)}", style="yellow")
    shown = [one for one in stacks.threads if idle or one.active or one.holds_gil]
    for thread in shown:
        state = "active" if thread.active else "idle"
        gil = ", holds the GIL" if thread.holds_gil else ""
        yield Text(f"  thread {thread.id} {plain_text(thread.name)}  {state}{gil}", style="cyan")
        yield from (Text(f"    {plain_text(frame)}") for frame in thread.frames)
    if hidden := len(stacks.threads) - len(shown):
        yield Text(f"  {hidden} idle thread{'s' * (hidden > 1)}: --all shows them", style="dim")


CONTROLLER_S = 100.0
"""Longest wait for stacks of another host: its agent answers within 90 s, or is lost."""


def stacks_command(
    run: Path, native: bool = False, as_json: bool = False, idle: bool = False
) -> int:
    """Print the Python stacks of every process of a live run; return 1 if any is missing.

    Idle threads are shown on request only; the JSON objects have all threads.
    """
    found_run = live_run(run)
    status = status_of(found_run)
    if holder(found_run) != status.pid:  # a stranger's directory could name any process
        raise RunUnavailable(
            f"process {status.pid}, the controller by status.json, does not hold the lock of "
            f"{found_run}: has the run ended?"
        )
    if not is_of_this_user(status.pid):
        raise RunUnavailable(f"{found_run} is a run of another user: only they can read its stacks")
    console = Console(highlight=False)
    found = asyncio.run(all_stacks(found_run, status, native))
    for stacks in found:
        if as_json:
            _write_json(asdict(stacks))
        else:
            for line in stack_lines(stacks, idle):
                console.print(line, soft_wrap=True)
    return int(any(stacks.error for stacks in found))


async def all_stacks(run: Path, status: RunStatus, native: bool) -> list[ProcessStacks]:
    """Return the stacks of the controller and of each actor. Waits for all of them.

    Processes of this machine are read from here, others by the controller's agents on their hosts.
    """
    actors = {NAME: [("controller", status.pid)]}
    for actor in status.actors:
        if actor.pid is not None:
            host = NAME if actor.with_controller else str(actor.host)
            actors.setdefault(host, []).append((actor.name, actor.pid))
    dumps = await asyncio.gather(
        *(
            _dumps_here(status.pid, [pid for _, pid in processes], native)
            if host == NAME
            else _dumps_there(run, host, [pid for _, pid in processes], native)
            for host, processes in actors.items()
        )
    )
    return [
        read_pyspy(name, pid, dump)
        for processes, found in zip(actors.values(), dumps, strict=True)
        for (name, pid), dump in zip(processes, found, strict=True)
    ]


async def _dumps_here(controller: int, pids: list[int], native: bool) -> list[StackDump]:
    """Read the controller and what it started; a status file could name other processes."""
    own = {pid for pid in pids if pid == controller or is_started_by(pid, controller)}
    read = iter(await dump_stacks([pid for pid in pids if pid in own], native))
    return [
        next(read) if pid in own else {"error": f"process {pid} is not, or no longer, of this run"}
        for pid in pids
    ]


async def _dumps_there(run: Path, host: str, pids: list[int], native: bool) -> list[StackDump]:
    try:
        async with asyncio.timeout(CONTROLLER_S):
            found: list[StackDump] = await ask(run, "stacks", host=host, pids=pids, native=native)
    except TimeoutError:
        late = f"the controller did not answer for {host} in {CONTROLLER_S:g} s"
        return [{"error": late} for _ in pids]
    except (RunUnavailable, ControlRefused) as error:
        return [{"error": str(error)} for _ in pids]
    return found


def tui_command(run: Path) -> int:
    """Open Monarch's own terminal interface on a live run, until the user quits it."""
    status = status_of(live_run(run))
    if status.admin_url is None:
        raise RunUnavailable("the run has no admin server yet: try again in a moment")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunUnavailable("the interface needs a terminal: use composer-mesh tree instead")
    open_tui(status.admin_url, TlsFiles.of_status(status.admin_tls))
    return 0


def _write_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
