"""Python stacks of a process, parsed from py-spy's output and formatted for the terminal.

Pure; text is shown as plain text, never as markup or control codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from composer_mesh.services.inspection.page import plain_text

NOT_FOUND = (
    "py-spy was not found by the process: pip install py-spy beside composer-mesh, or set "
    "PYSPY_BIN to it, then start the run again"
)


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
    """A process and its threads, or the error why they could not be read."""

    process: str
    pid: int | None
    threads: tuple[Thread, ...] = ()
    error: str = ""


def read_pyspy(process: str, pid: int | None, answer: dict[str, Any], native: bool) -> Stacks:
    """Parse an answer of Monarch's admin server; C frames are included only if `native`."""
    if "BinaryNotFound" in answer:
        return Stacks(process, pid, error=NOT_FOUND)
    if not isinstance(found := answer.get("Ok"), dict):
        said = "; ".join(f"{kind}: {_short(about)}" for kind, about in answer.items()) or "nothing"
        return Stacks(process, pid, error=f"{said}: is it stopped, or may it not be traced?")
    threads = tuple(_thread(one, native) for one in found["stack_traces"])
    return Stacks(process, found["pid"], tuple(one for one in threads if one.frames))


def _short(about: Any) -> str:
    if isinstance(about, dict):
        return ", ".join(f"{key} {value}" for key, value in about.items())
    return str(about)


def _thread(about: dict[str, Any], native: bool) -> Thread:
    return Thread(
        id=about["os_thread_id"] or about["thread_id"],
        name=about["thread_name"] or "",
        active=about["active"],
        holds_gil=about["owns_gil"],
        frames=tuple(
            f"{one['name']} ({one['short_filename'] or one['filename']}:{one['line']})"
            for one in about["frames"]
            if native or one["module"] is None
        ),
    )


def stack_lines(stacks: Stacks) -> Iterator[Text]:
    """Format the stacks of a process as terminal lines."""
    pid = "" if stacks.pid is None else f"  pid {stacks.pid}"
    yield Text.assemble((plain_text(stacks.process), "bold"), pid)
    if stacks.error:
        yield Text(f"  {plain_text(stacks.error)}", style="yellow")
    for thread in stacks.threads:
        state = "active" if thread.active else "idle"
        gil = ", holds the GIL" if thread.holds_gil else ""
        yield Text(f"  thread {thread.id} {plain_text(thread.name)}  {state}{gil}", style="cyan")
        yield from (Text(f"    {plain_text(frame)}") for frame in thread.frames)
