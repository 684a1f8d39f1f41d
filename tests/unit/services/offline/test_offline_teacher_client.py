"""The client of an offline replay: so many states at once, and a stop that loses no paid answer."""

from __future__ import annotations

import asyncio

import pytest
from preferences import ADD, answer, failure

from composer_mesh.rollouts.pairs import FailureKind, FrozenState, TeacherReply
from composer_mesh.services.offline.session import Stopped, TeacherClient, is_short


def state(number: int) -> FrozenState:
    return FrozenState(f"s{number}", [{"role": "user", "content": str(number)}], number)


class Panel:
    """Answers once its gate is open; a teacher that it waits for is refused after a stop."""

    def __init__(self, refused: FailureKind | None = None) -> None:
        self.running = self.most = self.calls = 0
        self.gate, self._refused, self._stopped = asyncio.Event(), refused, asyncio.Event()
        self.gate.set()

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self._refused is not None and state.seed:
                await self._stopped.wait()
                return [answer("a", ADD), failure("b", self._refused)]
            return [answer(name, ADD) for name in "abc"[:n]]
        finally:
            self.running -= 1

    def stop_waiting(self) -> None:
        self._stopped.set()


async def test_no_more_states_are_asked_about_at_once_than_allowed() -> None:
    panel = Panel()
    client = TeacherClient(panel, 3)
    await asyncio.gather(*(client.query(state(i), 1) for i in range(20)))
    assert panel.most == 3


async def test_a_stopped_client_answers_what_is_under_way_and_asks_nothing_new() -> None:
    panel = Panel()
    panel.gate.clear()
    client = TeacherClient(panel, 2)
    tasks = [asyncio.create_task(client.query(state(i), 1)) for i in range(5)]
    await asyncio.sleep(0)
    client.stop()
    panel.gate.set()
    await client.idle()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, Stopped) for result in results] == [False, False, True, True, True]
    assert panel.calls == 2


@pytest.mark.parametrize("kind", [FailureKind.BUDGET, FailureKind.SUSPENDED])
async def test_a_state_that_waits_gives_up_after_the_answers_under_way(kind: FailureKind) -> None:
    panel = Panel(kind)
    panel.gate.clear()
    client = TeacherClient(panel, 2)
    under_way, waiting = (asyncio.create_task(client.query(state(i), 2)) for i in range(2))
    await asyncio.sleep(0)
    client.stop()
    assert (under_way.done(), waiting.done()) == (False, False)
    panel.gate.set()
    with pytest.raises(Stopped):
        await waiting
    assert len(under_way.result()) == 2


def test_a_state_is_short_of_budget_where_a_teacher_was_not_asked_for_it() -> None:
    assert is_short([answer("a", ADD), failure("b", FailureKind.BUDGET)])
    assert not is_short([answer("a", ADD), failure("b", FailureKind.RATE)])
