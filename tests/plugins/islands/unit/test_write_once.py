"""Registers that are decided once, over stores that tear and repeat writes."""

from __future__ import annotations

import threading

import pytest
from islands_stores import Faults, FaultyStore, MemoryStore

from composer_mesh.plugins.islands.store.port import StoreUnavailable
from composer_mesh.plugins.islands.store.retrying import RetryingStore
from composer_mesh.plugins.islands.store.write_once import ATTEMPTS, decide, decided, seal


def no_sleep(_: float) -> None:
    """Wait for nothing."""


def test_what_is_written_first_is_decided_for_all() -> None:
    store = MemoryStore()

    assert decided(store, "a") is None
    assert decide(store, "a", {"n": 1}) == {"n": 1}
    assert decide(store, "a", {"n": 2}) == {"n": 1}
    assert decided(store, "a") == {"n": 1}


def test_a_torn_write_is_passed_over_by_everybody() -> None:
    store = MemoryStore()
    store.objects["a.0"] = seal({"n": 0})[:30]

    assert decided(store, "a", no_sleep) is None
    assert decide(store, "a", {"n": 1}, no_sleep) == {"n": 1}
    assert decided(store, "a", no_sleep) == {"n": 1}
    assert sorted(store.objects) == ["a.0", "a.1"]


class TornReads(MemoryStore):
    """Each read but the last of three is cut at another place."""

    reads = 0

    def get(self, key: str) -> bytes | None:
        data = super().get(key)
        self.reads += 1
        return data if data is None else data[: len(data) - self.reads]


def test_a_torn_read_is_not_taken_for_a_torn_write() -> None:
    store = TornReads()
    store.put_new("a.0", seal({"n": 0}))

    with pytest.raises(StoreUnavailable, match="two reads of it differ"):
        decide(store, "a", {"n": 1}, no_sleep)
    assert sorted(store.objects) == ["a.0"]


def test_a_store_that_tears_every_write_decides_nothing() -> None:
    store = FaultyStore(MemoryStore(), Faults(torn_silently=1.0), 0)

    with pytest.raises(StoreUnavailable, match=f"{ATTEMPTS} writes of it were torn"):
        decide(store, "a", {"n": 1}, no_sleep)


@pytest.mark.parametrize("seed", range(20))
def test_racing_writers_over_a_failing_store_agree(seed: int) -> None:
    store, found = MemoryStore(), list[object]()

    def race(number: int) -> None:
        faults = Faults(refused=0.2, lost_answer=0.2, torn=0.1)
        view = FaultyStore(store, faults, 100 * seed + number)
        found.append(decide(RetryingStore(view, 60, no_sleep), "a", {"n": number}, no_sleep))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(one == found[0] for one in found)
