"""Averages by torchft's Manager: real lighthouse, real gloo, islands in threads of this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from lighthouses import lighthouse_server

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.all_reduce import Clock, RoundLost
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    Vector,
    count_unusable,
    decode,
    encode,
)
from composer_mesh.plugins.islands.rounds.torchft_all_reduce import (
    Offer,
    RoundOutcome,
    TorchftAllReduce,
)
from composer_mesh.plugins.islands.rounds.torchft_rules import LighthouseUnfit, OtherLayout

SIZE = 1000
NOTHING = bytes(32)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_server(min_replicas=2) as address:
        yield address


def vector(seed: int, size: int = SIZE) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


class State:
    """A common state of one vector."""

    def __init__(self, values: Vector) -> None:
        self.values = values

    def dump(self) -> Vector:
        return self.values

    def load(self, values: Vector) -> None:
        self.values = values.copy()

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.values.tobytes()).digest()


def together(*work: Callable[[], Any]) -> list[Any]:
    """Run work in threads; return the results, or raise the first exception."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [one.result() for one in [pool.submit(each) for each in work]]


@contextmanager
def closing_all(islands: list[TorchftAllReduce]) -> Iterator[list[TorchftAllReduce]]:
    try:
        yield islands
    finally:
        for one in islands:
            one.close()


def island(
    lighthouse: str,
    rank: int,
    state: State | None = None,
    layout: bytes = NOTHING,
    clock: Clock | None = None,
    **more: Any,
) -> TorchftAllReduce:
    """One of two islands."""
    where = {"lighthouse": lighthouse, "rank": rank, "world_size": 2}
    known = {"deadline_s": 60.0, "request_s": 20.0}
    config = IslandsConfig.model_validate({"host": "127.0.0.1", **where, **known, **more})
    return TorchftAllReduce(config, layout, state or State(vector(0)), clock or Clock())


def joined(lighthouse: str, **more: Any) -> list[TorchftAllReduce]:
    return [island(lighthouse, rank, **{"quorum": 2, **more}) for rank in range(2)]


def averaged(one: TorchftAllReduce, values: Vector) -> Vector:
    """The mean of the islands' values in the next round; those that are not finite are in none."""
    how = one._config.quantization
    payload = None if count_unusable(values) else encode(values, how).payload
    return one.average(lambda _: Offer(payload, values.size, NOTHING)).mean


def both(islands: list[TorchftAllReduce], given: list[Vector]) -> list[Vector]:
    return together(*(partial(averaged, *pair) for pair in zip(islands, given, strict=True)))


def test_the_average_is_the_mean_round_after_round(lighthouse: str) -> None:
    with closing_all(joined(lighthouse)) as islands:
        for number in range(3):
            given = [vector(10 * number + rank) for rank in range(2)]

            found = both(islands, given)

            exact = np.mean(np.stack(given).astype(np.float64), axis=0)
            assert np.abs(found[0] - exact).max() <= 1e-6
            assert (found[0] == found[1]).all()
            assert [one.round for one in islands] == [number + 1] * 2


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_quantized_values_are_averaged_as_they_were_rounded(lighthouse: str, how: Any) -> None:
    with closing_all(joined(lighthouse, quantization=how)) as islands:
        given = [vector(1), vector(2)]

        found = both(islands, given)

        rounded = [decode(encode(one, how).payload, SIZE, how) for one in given]
        assert np.abs(found[0] - (rounded[0] + rounded[1]) / 2).max() <= 1e-6
        assert (found[0] == found[1]).all()
        assert 0 < islands[0].traffic.sent < 4 * SIZE


@pytest.mark.parametrize("how", ["none", "int8"])
def test_values_that_are_not_finite_are_never_averaged(lighthouse: str, how: Any) -> None:
    with closing_all(joined(lighthouse, quorum=1, quantization=how)) as islands:
        bad = vector(1)
        bad[3] = np.nan

        found = both(islands, [bad, vector(2)])

        alone = decode(encode(vector(2), how).payload, SIZE, how)
        assert all(np.abs(one - alone).max() <= 1e-6 for one in found)
        assert [one.round for one in islands] == [1, 1]


def test_values_by_which_a_mean_would_overflow_are_in_none(lighthouse: str) -> None:
    most = np.full(SIZE, np.finfo(np.float32).max, np.float32)
    islands = [island(lighthouse, rank, clock=one_attempt()) for rank in range(2)]
    with closing_all(islands):
        found = together(*(partial(lost, one, most) for one in islands))

        assert all("0 islands have contributed" in one for one in found), found
        assert [one.round for one in islands] == [0, 0]


def one_attempt() -> Clock:
    """Return a clock by which the deadline is over after the first attempt."""
    looks = chain([0.0, 0.0], repeat(1e6))
    return Clock(now=lambda: next(looks))


def lost(one: TorchftAllReduce, values: Vector) -> str:
    with pytest.raises(RoundLost) as told:
        averaged(one, values)
    return str(told.value)


def test_an_island_without_the_others_loses_the_round_and_finds_them_later(
    lighthouse: str,
) -> None:
    with closing_all(joined(lighthouse, request_s=4.0)) as islands:
        islands[0].deadline_s = 0.5

        assert "formed no quorum" in lost(islands[0], vector(1))

        islands[0].deadline_s = 60.0
        found = both(islands, [vector(1), vector(2)])
        assert (found[0] == found[1]).all()


def test_a_lighthouse_that_is_started_again_is_found_again() -> None:
    with ExitStack() as stack:
        with lighthouse_server(min_replicas=2) as address:
            islands = stack.enter_context(closing_all(joined(address, request_s=5.0)))
            both(islands, [vector(1), vector(2)])
        port = int(address.rpartition(":")[2])

        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(both, islands, [vector(3), vector(4)])
            stack.enter_context(lighthouse_server(min_replicas=2, port=port))
            found = later.result()

        assert np.abs(found[0] - (vector(3) + vector(4)) / 2).max() <= 1e-6
        assert [one.round for one in islands] == [2, 2]


def test_fewer_islands_than_the_quorum_average_nothing() -> None:
    with lighthouse_server(min_replicas=1) as address:
        alone = island(address, 0, quorum=2, clock=one_attempt())
        with closing_all([alone]):
            assert "1 islands have contributed but the quorum is 2" in lost(alone, vector(1))


def test_an_island_that_comes_later_gets_the_common_state_and_contributes_nothing() -> None:
    with lighthouse_server() as address:
        states = [State(vector(7)), State(vector(8))]
        first = island(address, 0, states[0])
        assert np.abs(averaged(first, vector(1)) - vector(1)).max() <= 1e-6
        second = island(address, 1, states[1])
        with closing_all([first, second]) as islands:
            found = together(
                lambda: until_both(first, states[0]), lambda: one_round(second, states[1])
            )

            assert [one.islands for one in found] == [(0,), (0,)]
            assert [one.gave for one in found] == [True, False]
            assert (states[1].values == vector(7)).all()
            assert first.round == second.round > 1
            assert [one.islands for one in outcomes(islands, states)] == [(0, 1), (0, 1)]


def one_round(one: TorchftAllReduce, state: State) -> RoundOutcome:
    """Take part in a round with an offer that starts from the state."""
    payload = encode(vector(one.rank), "none").payload
    return one.average(lambda _: Offer(payload, SIZE, state.digest))


def until_both(one: TorchftAllReduce, state: State) -> RoundOutcome:
    """Take part in rounds up to the first one of both islands."""
    while (found := one_round(one, state)).present != (0, 1):
        pass
    return found


def outcomes(islands: list[TorchftAllReduce], states: list[State]) -> list[RoundOutcome]:
    """Take part in one round with each island."""
    pairs = zip(islands, states, strict=True)
    return together(*(partial(one_round, *pair) for pair in pairs))


def test_islands_with_other_common_weights_are_not_averaged_and_heal(lighthouse: str) -> None:
    states = [State(vector(7)), State(vector(8))]
    islands = [island(lighthouse, rank, states[rank]) for rank in range(2)]
    with closing_all(islands):
        found = outcomes(islands, states)

        assert [one.islands for one in found] == [(0,), (0,)]
        assert (states[1].values == vector(7)).all()


def test_islands_with_other_rules_are_refused(lighthouse: str) -> None:
    islands = [island(lighthouse, rank, layout=bytes([rank]) * 32) for rank in range(2)]

    def refused(one: TorchftAllReduce) -> None:
        with pytest.raises(OtherLayout, match="give all islands one config"):
            averaged(one, vector(1))

    with closing_all(islands):
        together(*(partial(refused, one) for one in islands))


def test_one_island_needs_no_lighthouse() -> None:
    alone = island("http://127.0.0.1:9", 0, world_size=1)
    assert (averaged(alone, vector(1)) == vector(1)).all()
    alone.close()


def test_an_address_without_a_lighthouse_is_refused() -> None:
    with pytest.raises(LighthouseUnfit, match="start torchft_lighthouse"):
        island("http://127.0.0.1:9", 0, request_s=1.0)
