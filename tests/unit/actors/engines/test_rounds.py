"""Closed batches from shares: whose requests came when changes nothing for the engine."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest
from fake_host import turns

from composer_mesh.actors.engines.loop import Rounds
from composer_mesh.rollouts.generation import GenerationRequest


def requests(*names: str) -> list[GenerationRequest]:
    return [GenerationRequest(name, [1], 1, 1.0, 0, []) for name in names]


class Engine:
    """Keeps the order in which it is asked; answers with the name."""

    def __init__(self, broken: bool = False) -> None:
        self.asked: list[str] = []
        self.broken = broken

    def __call__(self, requests: list[GenerationRequest], _continues: bool) -> list[str]:
        if self.broken:
            raise RuntimeError("the engine has stopped")
        names = [request.request_id for request in requests]
        self.asked += names
        return names


SHARES = [["d", "a"], ["c"], ["b", "e"]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_shares_in_any_order_are_one_batch_and_each_gets_its_own(
    order: tuple[int, ...],
) -> None:
    engine = Engine()
    rounds = Rounds(engine)
    shares = [asyncio.ensure_future(rounds.share(0, 5, requests(*SHARES[n]), False)) for n in order]
    assert await asyncio.gather(*shares) == [SHARES[n] for n in order]
    assert engine.asked == ["a", "b", "c", "d", "e"]


async def test_a_round_waits_for_its_last_share() -> None:
    engine = Engine()
    rounds = Rounds(engine)
    share = asyncio.ensure_future(rounds.share(0, 2, requests("a"), False))
    await turns()
    assert (share.done(), engine.asked) == (False, [])
    assert await rounds.share(0, 2, requests("b"), False) == ["b"]
    assert await share == ["a"]


async def test_a_closed_round_asks_what_it_has_and_later_shares_wait_for_nobody() -> None:
    engine = Engine()
    rounds = Rounds(engine)
    early = [asyncio.ensure_future(rounds.share(n, 9, requests(f"{n}"), False)) for n in range(3)]
    await turns()
    rounds.close(1)
    assert await asyncio.gather(*early[:2]) == [["0"], ["1"]]
    assert await rounds.share(1, 9, requests("late"), False) == ["late"]
    assert not early[2].done()
    rounds.close(2)
    assert await early[2] == ["2"]


async def test_a_cancelled_share_holds_up_no_other() -> None:
    rounds = Rounds(Engine())
    one = asyncio.ensure_future(rounds.share(0, 2, requests("a"), False))
    await turns()
    one.cancel()
    assert await rounds.share(0, 2, requests("b"), False) == ["b"]


async def test_an_error_of_the_engine_reaches_every_share() -> None:
    rounds = Rounds(Engine(broken=True))
    shares = [rounds.share(0, 2, requests(name), False) for name in "ab"]
    for found in await asyncio.gather(*shares, return_exceptions=True):
        assert isinstance(found, RuntimeError)
