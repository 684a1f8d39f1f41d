"""Averages over a store in memory and in a folder: exact, agreed on, never of broken parts."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from islands_stores import MemoryStore

from composer_mesh.plugins.islands.rounds.all_reduce import (
    Clock,
    ObjectStoreAllReduce,
    RoundLost,
    WrongMean,
)
from composer_mesh.plugins.islands.rounds.outer_optimizer import Quantization
from composer_mesh.plugins.islands.rounds.rounds import BadRank, Contribution, RoundRules


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += max(seconds, 0.001)


def vectors(count: int, size: int = 700) -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.standard_normal(size).astype(np.float32) for _ in range(count)]


def islands(
    store: MemoryStore, count: int, rules: RoundRules | None = None, how: Quantization = "none"
) -> list[ObjectStoreAllReduce]:
    return [
        ObjectStoreAllReduce(store, rank, count, rules=rules, quantization=how, clock=Time().clock)
        for rank in range(count)
    ]


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_out_of_bounds_is_refused(rank: int) -> None:
    with pytest.raises(BadRank, match="give a rank from 0 to 1"):
        ObjectStoreAllReduce(MemoryStore(), rank, 2)


def test_a_single_island_gets_its_own_vector_without_the_store() -> None:
    store = MemoryStore()
    (one,) = vectors(1)

    mean = ObjectStoreAllReduce(store, 0, 1).all_reduce(one)

    assert (mean == one).all()
    assert mean is not one
    assert not store.objects


@pytest.mark.parametrize("how", ["none", "int8", "int4"])
def test_islands_in_a_folder_get_one_mean(tmp_path: Path, how: Quantization) -> None:
    own, found = vectors(3), dict[int, list[np.ndarray]]()

    def live(rank: int) -> None:
        one = ObjectStoreAllReduce(f"file://{tmp_path}", rank, 3, quantization=how)
        found[rank] = [one.all_reduce(own[rank] * turn) for turn in (1, 2)]

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    error = {"none": 1e-6, "int8": 0.02, "int4": 0.4}[how]
    for turn in (0, 1):
        np.testing.assert_allclose(
            found[0][turn], sum(own) / 3 * (turn + 1), atol=error * (turn + 1), rtol=0
        )
        assert all((found[rank][turn] == found[0][turn]).all() for rank in range(3))


def test_a_round_without_a_quorum_is_lost_after_its_deadline() -> None:
    one, _ = islands(MemoryStore(), 2, RoundRules(2, quorum=2, deadline_s=60))
    one.contribute(0, vectors(1)[0])

    with pytest.raises(RoundLost, match="1 islands have contributed after 60 s"):
        one.close(1, 700)


def test_a_round_closes_after_its_deadline_without_the_late_island() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    own = vectors(2)
    one.contribute(0, own[0])
    manifest = one.close(1, 700)

    two.contribute(0, own[1])

    assert two.close(1, 700) == manifest
    assert (two.mean(manifest, 700) == own[0]).all()


@pytest.mark.parametrize("late_s", [0.5, 3.1, 7.7, 33.0])
def test_a_wait_ends_soon_after_the_last_contribution(late_s: float) -> None:
    """Within a twentieth of the wait; and a wait of half a minute has no more than 150 looks."""
    store, time, looks = MemoryStore(), Time(), 0
    own = vectors(2)

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if time.seconds < late_s <= time.seconds + seconds:
            two.contribute(0, own[1])
        time.sleep(seconds)

    one = ObjectStoreAllReduce(store, 0, 2, clock=Clock(lambda: time.seconds, sleep))
    two = ObjectStoreAllReduce(store, 1, 2, clock=Time().clock)
    one.contribute(0, own[0])
    one.close(1, 700)

    assert late_s <= time.seconds <= 1.05 * late_s + 0.06
    assert looks <= 150


def test_a_late_contribution_is_added_to_the_next_round() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    own = vectors(4)
    one.contribute(0, own[0])
    one.close(1, 700)
    two.contribute(0, own[1])
    one.contribute(1, own[2])
    two.contribute(1, own[3])

    manifest = one.close(2, 700)

    assert manifest.contributions == (
        Contribution(0, 1),
        Contribution(1, 0),
        Contribution(1, 1),
    )
    expected = (own[1] + own[2] + own[3]) / 2
    np.testing.assert_allclose(one.mean(manifest, 700), expected, atol=1e-6)


BROKEN = {
    "torn": lambda data: data[:-9],
    "changed": lambda data: data[:50] + b"x" + data[51:],
    "nan": lambda data: b"\x00\x00\xc0\x7f" + data[4:],
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_broken_contribution_is_refused_and_named(kind: str) -> None:
    store, own = MemoryStore(), vectors(2)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    two.contribute(0, own[1])
    (part,) = [key for key in store.objects if ".parts/" in key]
    store.objects[part] = BROKEN[kind](store.objects[part])
    one.contribute(0, own[0])

    manifest = one.close(1, 700)

    assert manifest.islands == {0}
    assert [refused.contribution for refused in manifest.refused] == [Contribution(0, 1)]
    assert (one.mean(manifest, 700) == own[0]).all()


def test_an_intact_payload_of_nan_is_refused_by_its_readers() -> None:
    store, own = MemoryStore(), vectors(1)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    own[0][3] = np.nan
    two.contribute_encoded(0, own[0].tobytes(), 700)
    one.contribute(0, np.ones(700, np.float32))

    manifest = one.close(1, 700)

    assert manifest.islands == {0}
    assert "1 values that are not finite" in manifest.refused[0].why


def test_an_own_vector_of_nan_is_not_written() -> None:
    store = MemoryStore()
    one, _ = islands(store, 2)

    with pytest.raises(ValueError, match="values like NaN"):
        one.contribute(0, np.full(3, np.nan, np.float32))
    assert not store.objects


def test_a_contribution_of_another_size_is_refused() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    two.contribute(0, np.ones(3, np.float32))
    one.contribute(0, np.ones(700, np.float32))

    assert one.close(1, 700).islands == {0}


def test_a_contribution_that_breaks_later_gives_no_mean() -> None:
    store, own = MemoryStore(), vectors(2)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    one.contribute(0, own[0])
    two.contribute(0, own[1])
    manifest = one.close(1, 700)
    for key in [key for key in store.objects if ".parts/" in key]:
        del store.objects[key]

    with pytest.raises(WrongMean, match="is gone"):
        two.mean(manifest, 700)


def test_the_newest_round_is_found_behind_a_late_listing() -> None:
    class Late(MemoryStore):
        def keys(self, prefix: str):  # type: ignore[no-untyped-def]
            return iter([])

    one, two = islands(Late(), 2, RoundRules(2, deadline_s=1))
    for base in range(5):
        one.contribute(base, vectors(1)[0])
        one.close(base + 1, 700)

    assert two.newest() == 5
