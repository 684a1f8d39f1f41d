"""Waiting for the end of a process: told by the kernel, or looked for."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
from command_lines import until_named

from composer_mesh.mesh.hosts.host import LocalHost
from composer_mesh.mesh.processes import (
    _look_until_gone,
    children_of,
    cpu_seconds,
    descendants,
    end_of_child,
    is_alive,
    kill,
    kill_group,
    resident_bytes,
    runs,
    stands_still,
    start_ticks,
    wait_gone,
)

Wait = Callable[[int, float], Awaitable[bool]]
Process = asyncio.subprocess.Process


@pytest.fixture
async def sleeper() -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    await asyncio.to_thread(until_named, process.pid)
    yield process
    kill(process.pid)
    await process.wait()


@pytest.mark.parametrize("wait", [wait_gone, _look_until_gone])
async def test_a_process_that_runs_on_is_not_gone_at_the_deadline(
    sleeper: Process, wait: Wait
) -> None:
    assert not await wait(sleeper.pid, 0.05)
    assert is_alive(sleeper.pid)


@pytest.mark.parametrize("wait", [wait_gone, _look_until_gone])
@pytest.mark.parametrize("deadline_s", [30.0, math.inf])
async def test_the_end_of_a_process_ends_the_waiting(
    sleeper: Process, wait: Wait, deadline_s: float
) -> None:
    waiting = asyncio.ensure_future(wait(sleeper.pid, deadline_s))
    await asyncio.sleep(0)
    assert not waiting.done()
    kill(sleeper.pid)
    assert await waiting


@pytest.mark.parametrize("wait", [wait_gone, _look_until_gone])
async def test_a_process_that_was_collected_is_gone(sleeper: Process, wait: Wait) -> None:
    kill(sleeper.pid)
    await sleeper.wait()
    assert await wait(sleeper.pid, 0)


async def test_a_process_that_is_collected_while_it_is_looked_at_is_gone(sleeper: Process) -> None:
    found = psutil.Process(sleeper.pid)
    assert runs(found)
    kill(sleeper.pid)
    await sleeper.wait()
    assert not runs(found)


def test_a_process_that_waits_to_be_collected_is_gone_but_still_below_its_parent() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert not is_alive(pid)
        assert pid in descendants(os.getpid())
        assert pid not in children_of(os.getpid(), [])
    finally:
        os.waitpid(pid, 0)


async def test_children_are_found_by_their_arguments(sleeper: Process) -> None:
    assert children_of(os.getpid(), ["sleep", "60"]) == [sleeper.pid]
    assert children_of(os.getpid(), ["sleep", "61"]) == []
    assert children_of(sleeper.pid, []) == []


def test_a_stopped_process_stands_still() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    try:
        assert not stands_still(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert stands_still(pid)
        assert is_alive(pid)
    finally:
        kill(pid)
        os.waitpid(pid, 0)


def test_what_a_process_uses_is_told_while_it_is_there() -> None:
    assert (resident_bytes(os.getpid()) or 0) > 2**20
    assert (cpu_seconds(os.getpid()) or 0) > 0
    assert start_ticks(os.getpid()).isdecimal()
    assert (resident_bytes(-1), cpu_seconds(-1), start_ticks(-1)) == (None, None, "")


async def test_a_child_that_was_killed_is_said_to_have_been(sleeper: Process) -> None:
    waiting = asyncio.ensure_future(end_of_child(sleeper.pid))
    kill(sleeper.pid)
    said = await waiting
    # asyncio collects its children too, and may have been first
    assert said in ("its process failed: Killed(sig=9)", None)


def test_a_child_that_ends_is_left_for_others_to_collect() -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {})
    assert asyncio.run(end_of_child(pid)) == "its process exited with code 7"
    assert os.waitpid(pid, 0) == (pid, 7 << 8)


async def test_nothing_is_said_of_a_process_that_is_no_child() -> None:
    assert await end_of_child(1) is None


async def test_what_a_killed_process_has_started_in_its_group_ends_with_it() -> None:
    words = ("sh", "-c", "sleep 600 & echo $!; wait")
    leader = await asyncio.create_subprocess_exec(*words, stdout=PIPE, process_group=0)
    try:
        assert leader.stdout is not None
        started = int(await leader.stdout.readline())
        await LocalHost().kill([leader.pid])
        assert await wait_gone(started, 60)
    finally:
        kill_group(leader.pid)
        await leader.wait()
