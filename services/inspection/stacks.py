"""Python stacks of a process, parsed from py-spy's output and formatted for the terminal.

Pure; text is shown as plain text, never as markup or control codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from composer_mesh.mesh.pyspy import StackDump
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
class Stacks:
    """A process and its threads, or the error why they could not be read.

    `note` tells what the threads lack.
    """

    process: str
    pid: int | None
    threads: tuple[Thread, ...] = ()
    error: str = ""
    note: str = ""


def read_pyspy(process: str, pid: int | None, dump: StackDump) -> Stacks:
    """Parse what py-spy listed of a process; threads without a call are left out."""
    threads = tuple(_thread(one) for one in dump.get("threads", ()))
    called = tuple(one for one in threads if one.frames)
    return Stacks(process, pid, called, dump.get("error", ""), dump.get("note", ""))


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


def stack_lines(stacks: Stacks) -> Iterator[Text]:
    """Format the stacks of a process as terminal lines."""
    pid = "" if stacks.pid is None else f"  pid {stacks.pid}"
    yield Text.assemble((plain_text(stacks.process), "bold"), pid)
    if about := stacks.error or stacks.note:
        yield Text(f"  {plain_text(about)}", style="yellow")
    for thread in stacks.threads:
        state = "active" if thread.active else "idle"
        gil = ", holds the GIL" if thread.holds_gil else ""
        yield Text(f"  thread {thread.id} {plain_text(thread.name)}  {state}{gil}", style="cyan")
        yield from (Text(f"    {plain_text(frame)}") for frame in thread.frames)
