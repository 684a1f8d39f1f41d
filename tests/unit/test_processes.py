"""Waiting for the end of a process: told by the kernel, or looked for."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from composer_mesh.mesh import processes
from composer_mesh.mesh.processes import (
    _look_until_gone,
    end_of_child,
    is_alive,
    kill,
    wait_gone,
)

Wait = Callable[[int, float], Awaitable[bool]]
Process = asyncio.subprocess.Process


@pytest.fixture
async def sleeper() -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec("sleep", "60")
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
    assert await asyncio.wait_for(waiting, 20)


@pytest.mark.parametrize("wait", [wait_gone, _look_until_gone])
async def test_a_process_that_was_collected_is_gone(sleeper: Process, wait: Wait) -> None:
    kill(sleeper.pid)
    await sleeper.wait()
    assert await wait(sleeper.pid, 0)


async def test_a_process_that_is_collected_while_it_is_looked_at_is_gone(
    sleeper: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {os.getpid(): "R"}
    monkeypatch.setattr(processes, "_state", lambda pid: states.get(pid, ""))
    assert not is_alive(sleeper.pid)
    states.clear()  # nobody tells a state here
    assert is_alive(sleeper.pid)


async def test_a_child_that_was_killed_is_said_to_have_been(sleeper: Process) -> None:
    waiting = asyncio.ensure_future(end_of_child(sleeper.pid))
    kill(sleeper.pid)
    said = await asyncio.wait_for(waiting, 20)
    # asyncio collects its children too, and may have been first
    assert said in ("its process failed: Killed(sig=9)", None)


def test_a_child_that_ends_is_left_for_others_to_collect() -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], {})
    assert asyncio.run(end_of_child(pid)) == "its process exited with code 7"
    assert os.waitpid(pid, 0) == (pid, 7 << 8)


async def test_nothing_is_said_of_a_process_that_is_no_child() -> None:
    assert await asyncio.wait_for(end_of_child(1), 20) is None
