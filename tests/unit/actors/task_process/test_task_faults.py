"""Which call ended a task process, and where: from marks, stacks and the threads' CPU seconds."""

from __future__ import annotations

import sysconfig

import pytest

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
from composer_mesh.tasks.calls import CallMark

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
