"""Averages over a store: exact, agreed on, never of broken parts.

Objects that no island has written: stray keys, garbage, and more than a memory holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from islands_stores import MemoryStore

from composer_mesh.configs.islands import OuterSgd
from composer_mesh.plugins.islands.rounds.all_reduce import (
    Clock,
    ObjectStoreAllReduce,
    RoundLost,
    WrongMean,
)
from composer_mesh.plugins.islands.rounds.fragment_sync import FragmentSync
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    Vector,
    encode,
    make_outer,
    outer_gradient,
)
from composer_mesh.plugins.islands.rounds.rounds import Contribution, RoundRules
from composer_mesh.plugins.islands.store.blobs import decide, decided, seal
from composer_mesh.plugins.islands.store.opening import ObjectStore, open_store

SIZE = 700


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += max(seconds, 0.001)


def vectors(count: int, size: int = SIZE) -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.standard_normal(size).astype(np.float32) for _ in range(count)]


def islands(
    store: ObjectStore, count: int, rules: RoundRules | None = None
) -> list[ObjectStoreAllReduce]:
    rules = rules or RoundRules(count)
    return [
        ObjectStoreAllReduce(store, rank, "all", rules, "none", Time().clock)
        for rank in range(count)
    ]


def send(one: ObjectStoreAllReduce, base: int, vector: Vector) -> None:
    one.contribute(base, encode(vector, "none").payload, vector.size)


def test_a_round_without_a_quorum_is_lost_after_its_deadline() -> None:
    one, _ = islands(MemoryStore(), 2, RoundRules(2, quorum=2, deadline_s=60))
    send(one, 0, vectors(1)[0])

    with pytest.raises(RoundLost, match="1 islands have contributed after 60 s"):
        one.close(1, SIZE)


def test_a_round_closes_after_its_deadline_without_the_late_island() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    own = vectors(2)
    send(one, 0, own[0])
    manifest = one.close(1, SIZE)

    send(two, 0, own[1])

    assert two.close(1, SIZE) == manifest
    assert (two.mean(manifest, SIZE) == own[0]).all()


@pytest.mark.parametrize("late_s", [0.5, 3.1, 7.7, 33.0])
def test_a_wait_ends_soon_after_the_last_contribution(late_s: float) -> None:
    """Within a twentieth of the wait; and a wait of half a minute has no more than 150 looks."""
    store, time, looks = MemoryStore(), Time(), 0
    own = vectors(2)

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if time.seconds < late_s <= time.seconds + seconds:
            send(two, 0, own[1])
        time.sleep(seconds)

    _, two = islands(store, 2)
    clock = Clock(lambda: time.seconds, sleep)
    one = ObjectStoreAllReduce(store, 0, "all", RoundRules(2), "none", clock)
    send(one, 0, own[0])
    one.close(1, SIZE)

    assert late_s <= time.seconds <= 1.05 * late_s + 0.06
    assert looks <= 150


def test_a_late_contribution_is_added_to_the_next_round() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    own = vectors(4)
    send(one, 0, own[0])
    one.close(1, SIZE)
    send(two, 0, own[1])
    send(one, 1, own[2])
    send(two, 1, own[3])

    manifest = one.close(2, SIZE)

    assert manifest.contributions == (
        Contribution(0, 1),
        Contribution(1, 0),
        Contribution(1, 1),
    )
    expected = (own[1] + own[2] + own[3]) / 2
    np.testing.assert_allclose(one.mean(manifest, SIZE), expected, atol=1e-6)


BROKEN = {
    "torn": lambda data: data[:-9],
    "changed": lambda data: data[:50] + b"x" + data[51:],
    "nan": lambda data: b"\x00\x00\xc0\x7f" + data[4:],
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_broken_contribution_is_refused_and_named(kind: str) -> None:
    store, own = MemoryStore(), vectors(2)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    send(two, 0, own[1])
    (part,) = [key for key in store.objects if ".parts/" in key]
    store.objects[part] = BROKEN[kind](store.objects[part])
    send(one, 0, own[0])

    manifest = one.close(1, SIZE)

    assert manifest.islands == {0}
    assert [refused[:2] for refused in manifest.refused] == [(0, 1)]
    assert (one.mean(manifest, SIZE) == own[0]).all()


def test_an_intact_payload_of_nan_is_refused_by_its_readers() -> None:
    store, own = MemoryStore(), vectors(1)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    own[0][3] = np.nan
    two.contribute(0, own[0].tobytes(), SIZE)
    send(one, 0, np.ones(700, np.float32))

    manifest = one.close(1, SIZE)

    assert manifest.islands == {0}
    assert "1 values that are not finite" in manifest.refused[0].why


def test_a_contribution_of_another_size_is_refused() -> None:
    one, two = islands(MemoryStore(), 2, RoundRules(2, deadline_s=60))
    send(two, 0, np.ones(3, np.float32))
    send(one, 0, np.ones(700, np.float32))

    assert one.close(1, SIZE).islands == {0}


def test_a_contribution_that_breaks_later_gives_no_mean() -> None:
    store, own = MemoryStore(), vectors(2)
    one, two = islands(store, 2, RoundRules(2, deadline_s=60))
    send(one, 0, own[0])
    send(two, 0, own[1])
    manifest = one.close(1, SIZE)
    for key in [key for key in store.objects if ".parts/" in key]:
        del store.objects[key]

    with pytest.raises(WrongMean, match="is gone"):
        two.mean(manifest, SIZE)


def test_the_newest_round_is_found_behind_a_late_listing() -> None:
    class Late(MemoryStore):
        def keys(self, prefix: str):  # type: ignore[no-untyped-def]
            return iter([])

    one, two = islands(Late(), 2, RoundRules(2, deadline_s=1))
    for base in range(5):
        send(one, base, vectors(1)[0])
        one.close(base + 1, SIZE)

    assert two.newest() == 5


STRAY = ("999999999999", "99999999", "²", "٣", "-1", "1e9", "00000009x", "9" * 5000)


def sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


GARBAGE: dict[str, bytes] = {
    "no manifest": seal({"n": 1}),
    "of another round": seal(
        {"round": 7, "contributions": [[0, 0]], "refused": [], "closed_by": 0, "digest": ""}
    ),
    "without contributions": seal(
        {"round": 1, "contributions": [], "refused": [], "closed_by": 0, "digest": ""}
    ),
    "of an island that is none": seal(
        {"round": 1, "contributions": [[0, 10**30]], "refused": [], "closed_by": 0, "digest": ""}
    ),
    "infinite": seal({"round": 1e300, "contributions": [[0, 0]]}),
    "deep": b"0" * 64 + b"\n" + b"[" * 100_000,
    "deep with its checksum": sealed(b'{"round":' + b"[" * 100_000),
}


class Counting(MemoryStore):
    """Counts its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def get(self, key: str) -> bytes | None:
        self.counts[key.rpartition(".")[0]] += 1
        return super().get(key)


def hasty(store: Any) -> ObjectStoreAllReduce:
    """Return island 0, which waits for nobody."""
    return islands(store, 2, RoundRules(2, deadline_s=0.0))[0]


def closed_rounds(store: Any, rounds: int) -> list[ObjectStoreAllReduce]:
    both = islands(store, 2)
    for base in range(rounds):
        for one in both:
            send(one, base, np.ones(SIZE, np.float32))
        both[0].close(base + 1, SIZE)
    return both


def test_stray_rounds_cost_no_reads_and_change_nothing() -> None:
    store = Counting()
    closed_rounds(store, 5)
    for name in STRAY:
        store.objects[f"all/rounds/{name}.0"] = b"stray"
    store.counts.clear()

    assert islands(store, 2)[1].newest() == 5
    assert store.counts.total() <= 12


def test_stray_states_and_contributions_are_left_out() -> None:
    store = Counting()
    one, two = islands(store, 2)
    for name in (*STRAY, "00000"):
        store.objects[f"all/contributions/00000000/{name}/x.0"] = b"stray"
        store.objects[f"all/contributions/{name}/00001.0"] = b"stray"
        store.objects[f"all/states/{name}/outer.0"] = b"stray"
    send(one, 0, np.ones(SIZE, np.float32))
    send(two, 0, np.ones(SIZE, np.float32))

    assert one.close(1, SIZE).islands == {0, 1}
    assert "all/states/99999999/outer" not in store.counts


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_register_that_no_island_has_written_is_passed_over_by_all(garbage: str) -> None:
    store = MemoryStore()
    store.objects["all/rounds/00000001.0"] = GARBAGE[garbage]

    one, two = closed_rounds(store, 1)

    assert one.manifest(1) == two.manifest(1)
    assert two.newest() == 1
    assert (two.mean(two.close(1, SIZE), SIZE) == 1).all()


def test_a_head_that_states_another_size_is_refused_and_none_of_its_parts_is_read() -> None:
    store = Counting()
    one, _ = islands(store, 2)
    about = {"island": 1, "base": 0, "size": SIZE, "how": "none"}
    parts = [["all/x.parts/00000-0", 32 << 20, "0" * 64]] * 1000
    store.objects["all/contributions/00000000/00001.0"] = seal({"about": about, "parts": parts})
    send(one, 0, np.ones(SIZE, np.float32))

    assert hasty(store).close(1, SIZE).islands == {0}
    assert store.counts["all/x"] == 0


@pytest.mark.parametrize("value", [3e38, -2e9])
def test_values_that_are_finite_but_of_no_training_make_no_mean(value: float) -> None:
    store = MemoryStore()
    one, two = islands(store, 2)
    huge = np.full(SIZE, value, np.float32)
    two.contribute(0, huge.tobytes(), SIZE)
    send(one, 0, np.ones(SIZE, np.float32))
    third = hasty(store)

    manifest = third.close(1, SIZE)

    assert manifest.islands == {0}
    assert "above 1e+09" in manifest.refused[0].why
    assert (third.mean(manifest, SIZE) == 1).all()


def test_an_own_outer_gradient_that_others_would_refuse_is_not_sent() -> None:
    zero: Vector = np.zeros(SIZE, np.float32)
    for how in ("none", "int8", "int4"):
        assert outer_gradient(zero, np.full(SIZE, 2e9, np.float32), None, how) is None
        assert outer_gradient(zero, zero - 6e8, zero + 6e8, how) is None
        assert outer_gradient(zero, zero + 1, zero, how) is not None


def test_a_register_of_40_gigabytes_is_passed_over_unread(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store = open_store(f"file://{tmp_path}")
    with (tmp_path / "a.0").open("wb") as file:
        file.truncate(40 << 30)

    assert decided(store, "a") is None
    assert decide(store, "a", {"n": 1}) == {"n": 1}
    assert decided(store, "a") == {"n": 1}
    assert json.loads((tmp_path / "a.1").read_bytes().partition(b"\n")[2]) == {"n": 1}


def test_a_merge_that_this_island_did_not_note_is_passed_over() -> None:
    store = MemoryStore()
    one, _ = islands(store, 2)
    sync = FragmentSync(one, make_outer(OuterSgd()), "member", lambda *_: None)
    store.objects["all/merges/member/0.0"] = seal({"round": "many"})

    sync.join(np.ones(SIZE, np.float32))

    assert sync.round == 0
