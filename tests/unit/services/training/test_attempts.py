"""Work that is tried again after repairs: done once each, mended once a fault, nothing left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_world import others
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.services.training.checkpoint_writes import Attempts


class Fault(Exception):
    """What a process does when it is broken."""


class Machine:
    """A machine that work needs; it breaks when told, and repairs take some turns."""

    def __init__(self) -> None:
        self.attempts = Attempts()
        self.broken, self.mended, self.alone = False, 0, True
        self.begun: list[str] = []
        self.done: list[str] = []
        self.under_way = 0

    async def work(self, name: str, turns: int) -> str:
        self.begun.append(name)
        self.under_way += 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
                if self.broken:
                    raise Fault(name)
        finally:
            self.under_way -= 1
        self.done.append(name)
        return name

    async def mend(self, error: Exception) -> None:
        assert isinstance(error, Fault)
        await self.attempts.interrupt()
        for _ in range(3):
            self.alone = self.alone and self.under_way == 0
            await asyncio.sleep(0)
        self.broken, self.mended = False, self.mended + 1

    async def insist(self, name: str, turns: int) -> str:
        return await self.attempts.insist(lambda: self.work(name, turns), self.mend)


async def pass_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@given(
    turns=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    breaks=st.lists(st.integers(0, 12), max_size=3),
)
def test_whatever_breaks_when_all_work_is_done_once_and_repairs_run_alone(
    turns: list[int], breaks: list[int]
) -> None:
    async def run() -> Machine:
        machine = Machine()
        names = [str(place) for place in range(len(turns))]
        working = [
            asyncio.create_task(machine.insist(name, count))
            for name, count in zip(names, turns, strict=True)
        ]
        for wait in breaks:
            await pass_turns(wait)
            machine.broken = True
        assert await asyncio.gather(*working) == names
        assert sorted(machine.done) == names
        assert others() == set()
        return machine

    machine = asyncio.run(run())
    assert machine.alone
    assert machine.mended <= len(breaks)


async def test_a_fault_that_two_meet_is_mended_once() -> None:
    machine = Machine()
    machine.broken = True
    await asyncio.gather(machine.insist("one", 1), machine.insist("other", 2))
    assert machine.mended == 1
    assert sorted(machine.done) == ["one", "other"]


async def test_work_that_does_not_notice_the_fault_is_interrupted_and_done_again() -> None:
    machine, gate = Machine(), asyncio.Event()

    async def wait() -> str:
        machine.begun.append("waiting")
        await gate.wait()
        return "waited"

    waiting = asyncio.create_task(machine.attempts.insist(wait, machine.mend))
    await pass_turns(2)
    machine.broken = True
    await machine.insist("breaks", 1)
    await pass_turns(2)
    gate.set()
    assert await waiting == "waited"
    assert machine.begun.count("waiting") == 2


async def test_work_begins_only_when_the_repair_under_way_has_ended() -> None:
    machine = Machine()
    machine.broken = True
    repairing = asyncio.Event()

    async def mend(error: Exception) -> None:
        repairing.set()
        await machine.mend(error)

    breaks = machine.attempts.insist(lambda: machine.work("breaks", 1), mend)
    breaking = asyncio.create_task(breaks)
    await repairing.wait()
    await asyncio.gather(breaking, machine.insist("later", 1))
    assert machine.mended == 1
    assert machine.alone


async def test_what_cannot_be_mended_is_the_end_of_all_that_is_tried() -> None:
    machine, hopeless = Machine(), Fault("for good")

    async def give_up(_: Exception) -> None:
        await machine.attempts.interrupt()
        raise hopeless

    async def fail() -> None:
        raise Fault("now")

    other = asyncio.create_task(machine.insist("other", 50))
    await pass_turns(2)
    for work in (machine.attempts.insist(fail, give_up), other, machine.insist("later", 1)):
        with pytest.raises(Fault) as ended:
            await work
        assert ended.value is hopeless
    assert machine.begun == ["other"]
    assert machine.done == []
    assert others() == set()


async def test_a_cause_that_is_nobodys_to_mend_interrupts_nobody() -> None:
    machine, foreign = Machine(), Fault("foreign")

    async def judge(error: Exception) -> None:
        raise error

    async def fail() -> None:
        raise foreign

    other = asyncio.create_task(machine.insist("other", 5))
    await pass_turns(2)
    with pytest.raises(Fault, match="foreign"):
        await machine.attempts.insist(fail, judge)
    assert await other == "other"
    assert machine.begun == ["other"]


async def test_cancelling_ends_the_work_and_is_no_fault() -> None:
    machine = Machine()
    working = asyncio.create_task(machine.insist("one", 50))
    await pass_turns(3)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert (machine.under_way, machine.mended, machine.done) == (0, 0, [])
    assert others() == set()


async def test_work_that_ends_as_cancelled_by_itself_is_not_tried_again() -> None:
    machine = Machine()

    async def cancelled() -> Any:
        machine.begun.append("once")
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await machine.attempts.insist(cancelled, machine.mend)
    assert machine.begun == ["once"]


async def test_a_repair_that_nobody_asked_for_is_not_made_again_for_those_who_met_the_fault() -> (
    None
):
    machine = Machine()
    machine.broken = True

    async def notice() -> None:
        if machine.broken:
            await machine.mend(Fault("noticed"))

    await asyncio.gather(machine.insist("one", 2), machine.attempts.repair(notice))
    await machine.attempts.repair(notice)
    assert machine.mended == 1
    assert machine.done == ["one"]
