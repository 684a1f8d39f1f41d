"""A task's code that holds or ends its process costs its own call; all others are lost unharmed.

Which call ended a task process, and where: from marks, stacks and the threads' CPU seconds.

Sessions of an environment actor belong to the caller that opened them.
"""

from __future__ import annotations

import asyncio
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from in_process_calls import InProcessCalls
from raised_kinds import NAMES
from repetition import repeated

from composer_mesh.actors.environment import EnvironmentActor, UnknownSession
from composer_mesh.actors.task_process.process import (
    CrashStacks,
    Frame,
    TaskFault,
    busiest,
    end,
    hang,
    parsed_stacks,
    place,
)
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.rollouts.tasks import Episode, Outcome
from composer_mesh.tasks.calls import CallMark
from composer_mesh.tasks.errors import TaskCodeError, TaskError, TaskProcessEnded
from composer_mesh.tasks.toolbox import ToolboxTask

TASK = """
import asyncio
import ctypes
import os
import re
import signal
import threading

from raised_kinds import raised

from composer_mesh import Session, Task, reward

FAULTS = ["none", "holds", "holds_async", "sleeps", "segfault", "exits", "killed"]


class Faulty(Session):
    async def reply(self, text):
        if text == "wait":
            await asyncio.Event().wait()
        if text == "exit by a thread":
            threading.Timer(0.1, os._exit, [3]).start()
            await asyncio.Event().wait()


class Faults(Task):
    session_class = Faulty

    def rows(self, split):
        return [{"question": fault, "fault": fault} for fault in FAULTS]

    def prompt(self, row):
        return row["question"]

    @reward
    def plain(self, transcript):
        fault = transcript.row["fault"]
        if fault == "holds":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if fault == "sleeps":
            ctypes.PyDLL(None).sleep(100_000)
        if fault == "segfault":
            ctypes.string_at(0)
        if fault == "exits":
            os._exit(3)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    @reward
    async def waits(self, transcript):
        if transcript.row["fault"] == "holds_async":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if transcript.answer.startswith("raise "):
            raise raised(transcript.answer.split()[1])
        return 0.0
"""
FAULTS = {
    "holds": r"held the interpreter .*at plain \(.*faulty\.py:\d+\), in match \(",
    "holds_async": r"held the interpreter .*at waits \(.*faulty\.py:\d+\), in match \(",
    "sleeps": r"held the interpreter .*at plain \(.*faulty\.py:\d+\)",
    "segfault": r"ended the process .*sig=11\), at plain \(.*faulty\.py:\d+\), in string_at",
    "exits": r"ended the process of the task: its process exited with code 3",
    "killed": r"ended the process of the task: its process failed: Killed\(sig=9\)",
}
NUMBERS = {fault: number for number, fault in enumerate(["none", *FAULTS])}


class Environment:
    """The endpoints of an actor, called in this process."""

    def __init__(self, actor: EnvironmentActor) -> None:
        self.actor = actor

    async def __call__(self, endpoint: str, *args: Any) -> Any:
        return await own_endpoint(self.actor, endpoint)(*args)

    async def begin(self, name: str, fault: str = "none") -> None:
        await self("begin", name, Episode("faults", "train", NUMBERS[fault]))


async def loaded(folder: Path, build_config: Any, actor: EnvironmentActor, silent_s: float) -> Any:
    """An environment whose process counts as hung after a CPU second, or `silent_s` seconds."""
    (folder / "faulty.py").write_text(TASK)
    environment = Environment(actor)
    config = build_config(
        data={"task": f"{folder}/faulty.py:Faults"},
        environment={"hang_s": 1.0},
        supervision={"hang_s": silent_s},
    )
    await environment("load", config)
    return environment


@pytest.fixture
async def environment(tmp_path: Path, build_config: Any, environment_actor: Any) -> Environment:
    environment: Environment = await loaded(tmp_path, build_config, environment_actor(), 600.0)
    return environment


@pytest.mark.parametrize("fault", repeated(FAULTS, first=1))
async def test_a_call_that_holds_or_ends_its_process_is_charged_alone_with_its_place(
    fault: str, tmp_path: Path, build_config: Any, environment_actor: Any
) -> None:
    silent_s = 10.0 if fault == "sleeps" else 600.0  # it uses no CPU
    environment = await loaded(tmp_path, build_config, environment_actor(), silent_s)
    await environment.begin("guilty", fault)
    for name in ("waiting", "idle"):
        await environment.begin(name)
    waiting = asyncio.create_task(environment("step", "waiting", "wait"))
    before = environment.actor.details()["task_process"]
    with pytest.raises(TaskProcessEnded) as failed:
        await environment("finish", "guilty")
    said = str(failed.value)
    assert said.startswith(f"finish of train episode {NUMBERS[fault]} of task 'faults' ")
    assert re.search(FAULTS[fault], said), said
    for call in (waiting, environment("finish", "idle")):
        with pytest.raises(SessionLost) as lost:
            await call
        assert not lost.value.in_call
    await environment.begin("another")
    assert isinstance(await environment("finish", "another"), Outcome)
    assert environment.actor.details()["task_process"] != before
    assert not is_alive(before)


async def test_an_end_by_a_thread_that_no_call_runs_on_is_charged_to_the_calls_under_way(
    environment: Environment,
) -> None:
    await environment.begin("guilty")
    with pytest.raises(TaskProcessEnded, match="exited with code 3"):
        await environment("step", "guilty", "exit by a thread")
    await environment("forget", "guilty")
    for name, fault in (("guilty", "none"), ("waiting", "exits"), ("idle", "none")):
        await environment.begin(name, fault)
    waiting = asyncio.create_task(environment("step", "waiting", "wait"))
    for call in (environment("step", "guilty", "exit by a thread"), waiting):
        with pytest.raises(SessionLost) as lost:
            await call
        assert lost.value.in_call, "either may have caused it"
    with pytest.raises(SessionLost) as lost:
        await environment("finish", "idle")
    assert not lost.value.in_call


async def test_sessions_of_an_ended_process_are_forgotten_one_by_one(
    environment: Environment,
) -> None:
    for name, fault in (("guilty", "exits"), ("idle", "none")):
        await environment.begin(name, fault)
    with pytest.raises(TaskProcessEnded):
        await environment("finish", "guilty")
    assert environment.actor.in_use() == 2
    for name in ("guilty", "idle"):
        await environment("forget", name)
    assert environment.actor.in_use() == 0


async def test_several_calls_of_one_episode_are_one_cause(environment: Environment) -> None:
    for number in range(4):
        await environment.begin(f"s{number}", "killed")
    calls = (environment("finish", f"s{number}") for number in range(4))
    found = await asyncio.gather(*calls, return_exceptions=True)
    kinds = sorted(type(error).__name__ for error in found)
    assert kinds == ["SessionLost"] * 3 + ["TaskProcessEnded"]
    assert not any(error.in_call for error in found if isinstance(error, SessionLost))


@pytest.mark.parametrize("name", repeated(NAMES, 3))
async def test_whatever_a_reward_raises_is_answered_with_its_line(
    name: str, environment: Environment
) -> None:
    await environment.begin("s")
    await environment("step", "s", f"raise {name}")
    with pytest.raises(TaskError, match=name) as failed:
        await environment("finish", "s")
    assert isinstance(failed.value, TaskCodeError)
    assert "reward 'waits' of task 'faults' failed at" in str(failed.value)
    assert isinstance(await environment("prepare", Episode("faults", "train", 0)), tuple)


async def test_a_task_that_ends_its_process_while_it_loads_is_an_error_of_load(
    tmp_path: Path, build_config: Any, environment_actor: Any
) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    config = build_config(data={"task": f"{tmp_path}/dies.py:Dies"})
    with pytest.raises(TaskProcessEnded, match=r"load of the task ended .* code 7"):
        await own_endpoint(environment_actor(), "load")(config)


LIBRARY = sysconfig.get_path("stdlib")
USERS, OTHER = Frame("/home/a/task.py", 12, "r"), Frame("/home/a/task.py", 40, "<listcomp>")
MATCH = Frame(f"{LIBRARY}/re/__init__.py", 166, "match")
OURS = Frame(parsed_stacks.__code__.co_filename, 1, "parsed_stacks")
MARKS = [CallMark(0xA, 101, 7), CallMark(0xB, 102, 8)]
STACKS = CrashStacks({0xA: (OTHER,), 0xB: (MATCH, USERS)})


def dumped(*threads: str) -> str:
    return "Fatal Python error: Segmentation fault\n\n" + "\n\n".join(threads) + "\n"


def test_what_faulthandler_writes_is_read_whole_or_cut_off() -> None:
    first = 'Thread 0x000000000000000a (most recent call first):\n  File "/a b.py", line 3 in f'
    second = (
        'Current thread 0x000000000000000b (most recent call first):\n  File "x", line 4 in <g>'
    )
    found = parsed_stacks(dumped(first, second))
    assert found == CrashStacks({10: [Frame("/a b.py", 3, "f")], 11: [Frame("x", 4, "<g>")]}, 11)
    assert parsed_stacks(dumped(first, second)[:-20]).threads[11] == []
    assert parsed_stacks("") == CrashStacks({})


@pytest.mark.parametrize(
    ("seconds", "thread"),
    [
        ({}, None),
        ({1: 0.0}, None),
        ({1: 0.3}, 1),
        ({1: 0.3, 2: 0.01}, 1),
        ({1: 0.3, 2: 0.2}, None),
    ],
)
def test_a_thread_computes_if_it_uses_clearly_more_than_any_other(
    seconds: dict[int, float], thread: int | None
) -> None:
    assert busiest(seconds) == thread


def test_the_thread_that_computes_has_hung_and_its_place_is_named() -> None:
    fault = hang("held it", MARKS, STACKS, 102)
    assert fault == TaskFault(f"held it, at {USERS}, in {MATCH}", frozenset({8}))
    assert fault.certain


def test_without_a_thread_that_computes_every_marked_call_may_have_hung() -> None:
    for native in (None, 999):
        fault = hang("held it", MARKS, STACKS, native)
        assert (fault.calls, fault.certain) == ({7, 8}, False)
        assert str(OTHER) in fault.reason
        assert str(USERS) in fault.reason
    assert hang("held it", MARKS[:1], CrashStacks({}), None) == TaskFault("held it", frozenset({7}))


def test_the_thread_that_crashed_ended_the_process() -> None:
    crashed = CrashStacks(STACKS.threads, 0xA)
    assert end("Killed(sig=11)", MARKS, crashed).calls == {7}
    assert end("Killed(sig=9)", MARKS, STACKS).calls == {7, 8}
    assert end("it exited with code 3", [], STACKS).calls == frozenset()


def test_a_place_is_the_users_function_and_what_it_called() -> None:
    assert place([MATCH, USERS, OTHER]) == f"{USERS}, in {MATCH}"
    assert place([USERS, OTHER]) == str(USERS)
    assert place([MATCH, OURS]) == str(MATCH)
    assert place([]) == ""


async def test_a_dead_callers_sessions_are_dropped_and_no_others(
    toolbox: ToolboxTask, build_config: Any, environment_actor: Any
) -> None:
    actor = environment_actor()
    await own_endpoint(actor, "load")(build_config())
    callers = {name: InProcessCalls(name, actor) for name in ("rollouts-0", "rollouts-1")}
    for name, calls in callers.items():
        for number in range(2):
            await calls.call("begin", f"{name}/{number}", toolbox.episode("train", number))
    assert actor.in_use() == 4
    await own_endpoint(actor, "close_calls")("rollouts-0")
    assert actor.in_use() == 2
    with pytest.raises(UnknownSession):
        await callers["rollouts-1"].call("finish", "rollouts-0/0")
    for number in range(2):
        await callers["rollouts-1"].call("finish", f"rollouts-1/{number}")
    assert actor.in_use() == 0


ASKS = """
from composer_mesh import Session, Task, reward


class Broken(Session):
    def start(self):
        raise KeyError("of start")

    def close(self):
        self.never_set.close()


class Asks(Task):
    session_class = Broken

    def generate(self, rng):
        return {"question": str(rng.random())}

    def prompt(self, row):
        return row["question"]

    @reward
    def right(self, transcript):
        assert transcript.session is None
        return float(transcript.answer == "yes")
"""


async def test_a_session_that_cannot_start_is_told_by_its_start_and_messages_are_scored_without_one(
    tmp_path: Path, build_config: Any, environment_actor: Any
) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    actor = environment_actor()
    await own_endpoint(actor, "load")(build_config(data={"task": f"{tmp_path}/asks.py:Asks"}))
    episode = Episode("asks", "train", 0)
    with pytest.raises(TaskCodeError, match="KeyError: 'of start'") as failed:
        await own_endpoint(actor, "begin")("session", episode)
    assert "never_set" in failed.value.__notes__[0]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    outcome = await own_endpoint(actor, "score")(episode, said)
    assert (outcome.reward, outcome.success) == (1.0, True)
