"""The process in which an environment actor runs its task's code, which can be killed alone.

    EnvironmentActor -- calls --> TaskProcess -- sockets --> TaskServer
                                  a ping each second; files of marks and stacks outlive it

A process whose interpreter is held is killed. The call that held it fails with the place; others
are lost through no fault of theirs.

Which call has hung or ended a task process, and where its code was: pure rules.

The marks say which thread runs which call, the system which thread computes, and faulthandler
where each thread is.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from composer_mesh.configs.user_code import PACKAGE, is_library
from composer_mesh.mesh.call_server import Endpoint, OpenCall, PipeCalls
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.processes import cpu_seconds, end_of_child, kill_group
from composer_mesh.mesh.programs import reap, start_tied
from composer_mesh.mesh.supervision import SessionLost, heard
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, reported_to_loop
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.calls import MARKS_BYTES, STACKS_SIGNAL, CallMark, read_marks
from composer_mesh.tasks.errors import TaskProcessEnded, calls_tasks

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
class CrashStacks:
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


def parsed_stacks(text: str) -> CrashStacks:
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
    return CrashStacks(threads, crashed)


def busiest(seconds: Mapping[int, float]) -> int | None:
    """Return the thread that used clearly more CPU than any other; None if there is none."""
    ranked = sorted(seconds.items(), key=lambda one: -one[1])
    if not ranked or ranked[0][1] <= 0:
        return None
    if len(ranked) > 1 and ranked[0][1] < CLEARLY_MORE * ranked[1][1]:
        return None
    return ranked[0][0]


def hang(
    what: str, marks: Sequence[CallMark], stacks: CrashStacks, native_thread: int | None
) -> TaskFault:
    """Return the fault of a process whose interpreter is held; `native_thread` computes there."""
    holders = [mark for mark in marks if mark.native_thread == native_thread]
    return _fault(what, holders or list(marks), stacks)


def end(how: str, marks: Sequence[CallMark], stacks: CrashStacks) -> TaskFault:
    """Return the fault of a process that has ended; `how` is in Monarch's wording."""
    crashed = [mark for mark in marks if mark.thread == stacks.crashed]
    return _fault(f"ended the process of the task: {how}", crashed or list(marks), stacks)


def _fault(what: str, marks: Sequence[CallMark], stacks: CrashStacks) -> TaskFault:
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


PROGRAM = "composer_mesh.actors.task_process.server"
PING_S = 1.0
LOOK_S = 0.1
BUSY_S, BUSY_WAIT_S = 0.1, 3.0
"""CPU seconds of a thread after which it is compared with others, and the longest wait for them."""
OF_TASK = frozenset({"load", "prepare", "score", "score_group", "begin", "step", "finish"})
"""Endpoints that run the task's code."""
STACKS_WAIT_S = 3.0
"""Longest wait for the stacks of a process; without them its place is unknown."""


class TaskProcess:
    """One process, from `start` to its end; `fault` says why it ended.

    `endpoint` serves its calls to the actor. It counts as hung after `hang_s` CPU seconds, or
    `silent_s` seconds, in which it answered no ping.
    """

    def __init__(self, endpoint: Callable[[str], Endpoint], hang_s: float, silent_s: float) -> None:
        self.fault: TaskFault | None = None
        self.episodes: dict[str, Episode] = {}
        """The episodes of its sessions, by the sessions' names."""
        self._hang_s, self._silent_s, self._held = hang_s, silent_s, ""
        self._marks, self._stacks = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._marks.truncate(MARKS_BYTES)
        self._tasks = BackgroundTasks(reported_to_loop)
        self._watching: list[asyncio.Task[None]] = []
        self._gone = False
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), self._marks.fileno(), self._stacks.fileno()]
        with theirs:
            command = python_module(PROGRAM, *map(str, passed))
            self.pid = start_tied(command, os.environ, pass_fds=passed)
        self._calls = PipeCalls(ours, endpoint, lambda: None, self.end_for)
        self._ending = self._tasks.start(f"end of task process {self.pid}", self._wait_for_end())

    async def start(self, *load: Any) -> None:
        """Load the task there; watch the process from then on. Raises what loading raised."""
        await self._calls.open()
        try:
            await self.call("load", *load)
        except BaseException:
            await self.close()
            raise
        self._watching = [self._tasks.start(f"pings of task process {self.pid}", self._watch())]

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint of `TaskServer`. Waits for its answer, or the end of the process.

        Raises TaskProcessEnded where the call itself has ended the process, and SessionLost where
        something else has; that is a loss in its call if it may have been the cause.
        """
        return await self._calls.call(endpoint, *args)

    def lost(self, session_id: str) -> SessionLost:
        """Return the error for a session of a process that has ended."""
        assert self.fault is not None
        return _session_lost(session_id, self.fault, in_call=False)

    def words(self, endpoint: str, args: Sequence[Any]) -> str:
        """Describe a call by its endpoint and episode, for errors."""
        one = self._episode(args)
        if one is None:
            return f"{endpoint} of the task"
        return f"{endpoint} of {one.split} episode {one.index} of task {one.task!r}"

    def end_for(self, error: BaseException) -> None:
        """Kill the process because of an error: its open calls end without being its cause."""
        self._kill(TaskFault(f"the process of the task was ended: {error}"))

    async def close(self) -> None:
        """Kill the process. Waits for its end."""
        self._kill(TaskFault("the process of the task was stopped"))
        await asyncio.wait([self._ending])
        await self._tasks.close()

    def _kill(self, fault: TaskFault) -> None:
        self.fault = self.fault or fault
        if not self._gone:  # afterwards another process may have its pid
            kill_group(self.pid)

    async def _wait_for_end(self) -> None:
        how = await end_of_child(self.pid) or "its process has ended"
        self._gone = True
        await asyncio.to_thread(reap, self.pid)
        await cancel_and_wait(self._watching)
        stacks, marks = self._written_stacks(), read_marks(self._marks.fileno())
        self.fault = self._narrowed(self.fault or self._suspected(end(how, marks, stacks)))
        self._calls.end_calls(partial(self._error_of, self.fault))
        await self._calls.close()
        self._marks.close()
        self._stacks.close()

    def _suspected(self, fault: TaskFault) -> TaskFault:
        """Return a fault of every open call where no marked one is: a thread that a task started
        may have caused it, and a loss that counts for nobody would be repeated forever."""
        calls = self._calls.unanswered
        if not fault.calls.isdisjoint(calls):
            return fault
        those = (number for number, one in calls.items() if one.endpoint in OF_TASK)
        return TaskFault(fault.reason, frozenset(those))

    def _narrowed(self, fault: TaskFault) -> TaskFault:
        """Return a fault of one call if all that may have caused it are of the same episode."""
        calls = self._calls.unanswered
        open_ones = [number for number in sorted(fault.calls) if number in calls]
        episodes = {self.words("", calls[number].args) for number in open_ones}
        chosen = open_ones[:1] if len(episodes) == 1 else open_ones
        return TaskFault(fault.reason, frozenset(chosen))

    def _error_of(self, fault: TaskFault, number: int, one: OpenCall) -> Exception:
        """Return the error of an open call of the process, which has ended."""
        if one.endpoint == "load" or (fault.certain and number in fault.calls):
            return TaskProcessEnded(self.words(one.endpoint, one.args), fault.reason)
        session = next((arg for arg in one.args[:1] if isinstance(arg, str)), "")
        return _session_lost(session, fault, in_call=number in fault.calls)

    def _episode(self, args: Sequence[Any]) -> Episode | None:
        known = (self.episodes.get(one) if isinstance(one, str) else one for one in args[:2])
        return next((one for one in known if isinstance(one, Episode)), None)

    async def _watch(self) -> None:
        while await self._answers():  # noqa: ASYNC110  another process answers
            await asyncio.sleep(PING_S)
        if self.fault is None:
            fault = self._suspected(await self._hang())
            self._kill(fault)
            sys.stderr.write(f"composer-mesh: task process {self.pid} {fault.reason}\n")

    async def _answers(self) -> bool:
        """Ping once; return whether it was answered before the process counts as hung.

        Time is counted in slices, so that it does not advance while this process is stopped.
        """
        asking, silent_s = asyncio.ensure_future(self._calls.call("ping")), 0.0
        before = cpu_seconds(self.pid) or 0.0
        while not (await asyncio.wait([asking], timeout=PING_S))[0]:
            silent_s += PING_S
            used_s = (cpu_seconds(self.pid) or 0.0) - before
            if used_s >= self._hang_s or silent_s >= self._silent_s:
                self._held = f"{used_s:.0f} s of CPU time in {silent_s:.0f} s"
                asking.add_done_callback(heard)
                return False
        return self.fault is None and asking.exception() is None

    async def _hang(self) -> TaskFault:
        what = f"held the interpreter for {self._held} and its process was killed"
        computing = await self._computing_thread()
        stacks = await self._dumped_stacks()
        return hang(what, read_marks(self._marks.fileno()), stacks, computing)

    async def _computing_thread(self) -> int | None:
        """Return the thread that clearly uses most CPU. Waits until one has used some."""
        before, waited_s = _thread_seconds(self.pid), 0.0
        while waited_s < BUSY_WAIT_S:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
            now = _thread_seconds(self.pid)
            used = {one: seconds - before.get(one, 0.0) for one, seconds in now.items()}
            if max(used.values(), default=0.0) >= BUSY_S:
                return busiest(used)
        return None

    async def _dumped_stacks(self) -> CrashStacks:
        """Have the process write its stacks. Waits until they stay as they are."""
        size, waited_s = 0, 0.0
        try:
            os.kill(self.pid, STACKS_SIGNAL)
        except ProcessLookupError:
            return CrashStacks({})
        while waited_s < STACKS_WAIT_S:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
            before, size = size, os.fstat(self._stacks.fileno()).st_size
            if size == before > 0:
                break
        return self._written_stacks()

    def _written_stacks(self) -> CrashStacks:
        size = os.fstat(self._stacks.fileno()).st_size
        return parsed_stacks(os.pread(self._stacks.fileno(), size, 0).decode(errors="replace"))


def _session_lost(session_id: str, fault: TaskFault, *, in_call: bool) -> SessionLost:
    reason = f"another call {fault.reason}" if fault.certain else fault.reason
    return SessionLost(session_id, "a task process", reason, in_call)


def _thread_seconds(pid: int) -> dict[int, float]:
    try:
        threads = psutil.Process(pid).threads()
    except psutil.Error:
        return {}
    return {one.id: one.user_time + one.system_time for one in threads}
