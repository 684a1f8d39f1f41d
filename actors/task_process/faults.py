"""Which call has hung or ended a task process, and where its code was: pure rules.

The marks say which thread runs which call, the system which thread computes, and faulthandler
where each thread is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_mesh.tasks.call_marks import CallMark
from composer_mesh.tasks.errors import PACKAGE, calls_tasks, is_library

ACTORS = str(PACKAGE / "actors")
THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
CLEARLY_MORE = 2.0
"""A thread is the one that computes if it uses so many times the CPU of any other."""


@dataclass(frozen=True)
class Frame:
    """A call on the stack of a thread."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Stacks:
    """What faulthandler wrote: frames by thread, innermost first, and the thread that crashed."""

    threads: Mapping[int, Sequence[Frame]]
    crashed: int | None = None


@dataclass(frozen=True)
class TaskFault:
    """Why a task process ended; `calls` may have caused it, a single one certainly has."""

    reason: str
    calls: frozenset[int] = frozenset()

    @property
    def certain(self) -> bool:
        """Whether one call is known to be the cause."""
        return len(self.calls) == 1


def parsed_stacks(text: str) -> Stacks:
    """Parse what faulthandler wrote; unknown lines are skipped."""
    threads, crashed = dict[int, list[Frame]](), None
    frames = list[Frame]()
    for line in text.splitlines():
        if (thread := THREAD.match(line)) is not None:
            ident = int(thread[2], 16)
            frames = threads[ident] = []
            crashed = ident if thread[1] == "Current thread" else crashed
        elif (frame := FRAME.match(line)) is not None:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return Stacks(threads, crashed)


def busiest(seconds: Mapping[int, float]) -> int | None:
    """Return the thread that used clearly more CPU than any other; None if there is none."""
    ranked = sorted(seconds.items(), key=lambda one: -one[1])
    if not ranked or ranked[0][1] <= 0:
        return None
    if len(ranked) > 1 and ranked[0][1] < CLEARLY_MORE * ranked[1][1]:
        return None
    return ranked[0][0]


def hang(
    what: str, marks: Sequence[CallMark], stacks: Stacks, native_thread: int | None
) -> TaskFault:
    """Return the fault of a process whose interpreter is held; `native_thread` computes there."""
    holders = [mark for mark in marks if mark.native_thread == native_thread]
    return _fault(what, holders or list(marks), stacks)


def end(how: str, marks: Sequence[CallMark], stacks: Stacks) -> TaskFault:
    """Return the fault of a process that has ended; `how` is in Monarch's wording."""
    crashed = [mark for mark in marks if mark.thread == stacks.crashed]
    return _fault(f"ended the process of the task: {how}", crashed or list(marks), stacks)


def _fault(what: str, marks: Sequence[CallMark], stacks: Stacks) -> TaskFault:
    places = {place(stacks.threads.get(mark.thread, ())) for mark in marks} - {""}
    where = f", at {' or '.join(sorted(places))}" if places else ""
    return TaskFault(f"{what}{where}", frozenset(mark.call for mark in marks))


def place(frames: Sequence[Frame]) -> str:
    """Name the innermost function of the user's, and the function of a library that it called."""
    if not frames:
        return ""
    users = [frame for frame in frames if not _is_shipped(frame.file)]
    first = users[0] if users else frames[0]
    inner = f", in {frames[0]}" if frames[0] is not first else ""
    return f"{first}{inner}"


def _is_shipped(file: str) -> bool:
    """Whether a file is of Python's library, an installed package, or what calls tasks."""
    return is_library(file) or file.startswith(ACTORS) or calls_tasks(file)
