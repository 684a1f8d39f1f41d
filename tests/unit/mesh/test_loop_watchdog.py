"""What counts as a loop that stands still: what its thread does, and not what the machine does."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import standing_loop

from composer_mesh.mesh import loop_watchdog
from composer_mesh.mesh.loop_watchdog import (
    LoopWatchdog,
    SilentTime,
    longest_wait,
    wait_for_cores,
    waits_for_the_machine,
)

PERIOD_S = 0.05


def silent(*slices: tuple[float, float, float]) -> float:
    """The seconds of a silence from its slices: elapsed, computed, the machine's part."""
    computed = 0.0
    counted = SilentTime(PERIOD_S, computed)
    for elapsed, computing, machine in slices:
        computed += computing
        counted.add(elapsed, computed, machine)
    return counted.seconds


@pytest.mark.parametrize(
    ("slices", "seconds"),
    [
        pytest.param([(PERIOD_S, 0.0, 0.0)] * 20, 1.0, id="the thread waits for a disk"),
        pytest.param([(PERIOD_S, 0.01, 0.04)] * 20, 0.2, id="the machine gave no core"),
        pytest.param([(30.0, 0.0, 0.0)], PERIOD_S, id="the whole process stood still"),
        pytest.param([(2.0, 1.9, 0.1)], 1.9, id="a call into C holds the interpreter"),
    ],
)
def test_what_the_thread_does_counts_and_not_what_the_machine_does(
    slices: list[tuple[float, float, float]], seconds: float
) -> None:
    assert silent(*slices) == pytest.approx(seconds)


def test_the_wait_of_any_thread_for_a_core_is_the_machines_part() -> None:
    """A thread that has just begun counts from its beginning."""
    before, after = {"1": 5.0, "2": 1.0}, {"1": 5.1, "2": 1.4, "3": 0.2}
    assert wait_for_cores(before, after, "1") == pytest.approx(0.1 + 0.4)
    assert wait_for_cores(before, after, "2") == pytest.approx(0.4 + 0.2)
    assert wait_for_cores(before, after, "9") == pytest.approx(0.4)
    assert wait_for_cores({}, {}, "1") == 0.0


def test_a_wait_for_a_core_that_began_in_earlier_slices_is_not_counted_there_either() -> None:
    """The kernel tells of a wait when it ends; what the thread computed meanwhile still counts."""
    counted = SilentTime(PERIOD_S, 0.0)
    for _ in range(20):
        counted.add(PERIOD_S, 0.0, 0.0)
    counted.add(PERIOD_S, 0.03, 0.0)
    counted.excuse(0.825)  # the last slice computed, then 15 whole ones and a half
    assert counted.seconds == pytest.approx(0.03 + 0.225)
    counted.excuse(0.7)  # of another thread at the same time
    counted.excuse(-1.0)
    assert counted.seconds == pytest.approx(0.03 + 0.225)
    counted.excuse(5.0)
    counted.end(0.04)
    assert counted.seconds == pytest.approx(0.04)


def test_the_longest_wait_is_that_of_a_thread_which_was_there_before() -> None:
    before, after = {"1": 5.0, "2": 1.0, "ended": 9.0}, {"1": 5.1, "2": 1.4, "new": 0.7}
    assert longest_wait(before, after) == pytest.approx(0.4)
    assert longest_wait({}, after) == 0.0


@pytest.fixture
def reports() -> list[tuple[float, str]]:
    return []


def test_a_loop_that_waits_in_a_callback_is_reported_with_its_stack() -> None:
    """In a process of its own: a thread that an earlier test left may import or compute forever."""
    program = subprocess.run(
        [sys.executable, standing_loop.__file__], stdout=subprocess.PIPE, check=True
    )
    seconds, stack = json.loads(program.stdout)
    assert seconds > 0.2
    assert "in stand_still" in stack
    assert stack.endswith(" s without an answer in all\n")


def wait_for_a_core(waited: list[float]) -> None:
    """As the loop's thread does on a busy machine; the kernel adds the second when it is over."""
    time.sleep(1.0)
    waited[0] = 60.0  # more than any machine adds to the second


async def test_a_loop_whose_thread_waited_for_a_core_all_the_time_is_not_reported(
    reports: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is known once it has ended, which is with the answer."""
    waited, task = [0.0], str(threading.get_native_id())
    monkeypatch.setattr(loop_watchdog, "queued_by_thread", lambda: {task: waited[0]})
    watchdog = LoopWatchdog(0.2, lambda *report: reports.append(report), period_s=0.01)
    watchdog.start()
    wait_for_a_core(waited)
    answered = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(answered.set_result, None)
    await answered
    await asyncio.to_thread(watchdog.stop)
    assert reports == []


async def test_a_loop_that_only_waits_for_events_is_not_reported(
    reports: list[tuple[float, str]],
) -> None:
    asked = threading.Event()
    watchdog = LoopWatchdog(0.2, lambda *report: reports.append(report), period_s=0.01)
    watchdog.start()
    await asyncio.to_thread(asked.wait, 0.5)
    watchdog.stop()
    assert reports == []


def test_the_watch_ends_with_the_thread_of_its_loop(reports: list[tuple[float, str]]) -> None:
    """Also where nobody has closed the loop; an error in the watching thread fails this test."""
    watchdogs: list[LoopWatchdog] = []

    async def watched() -> None:
        watchdogs.append(LoopWatchdog(0.2, lambda *report: reports.append(report)))
        watchdogs[0].start()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[watched()])
    thread.start()
    thread.join()
    watchdogs[0].ended()
    loop.close()
    assert reports == []


def test_a_limit_below_the_period_is_refused() -> None:
    async def make() -> None:
        LoopWatchdog(0.01, lambda *_: None)

    with pytest.raises(ValueError, match="raise limit_s"):
        asyncio.run(make())


async def test_a_wait_during_an_import_in_another_thread_is_not_counted(
    reports: list[tuple[float, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import may hold the interpreter, which no thread can tell from a wait."""
    gate = types.ModuleType("gate_of_an_import")
    gate.entered, gate.leave = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    code = "import gate_of_an_import as gate\ngate.entered.set()\ngate.leave.wait()\n"
    (tmp_path / "slow_to_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    importing.start()
    gate.entered.wait()
    watchdog = LoopWatchdog(limit_s=0.1, report=lambda *told: reports.append(told), period_s=0.01)
    watchdog.start()
    threading.Event().wait(0.5)  # the blocked callback itself
    await asyncio.sleep(0)
    gate.leave.set()
    await asyncio.to_thread(importing.join)
    watchdog.stop()
    assert reports == []


class _Started(threading.Event):
    """The event on which `Thread.start` waits; notes whether that wait is excused."""

    excused = False

    def wait(self, timeout: float | None = None) -> bool:
        self.excused = waits_for_the_machine(sys._getframe())
        return super().wait(timeout)


def test_the_wait_for_a_new_thread_is_the_machines_part_and_another_wait_is_not() -> None:
    thread, started = threading.Thread(target=bool), _Started()
    thread._started = started  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert started.excused
    assert not waits_for_the_machine(sys._getframe())
