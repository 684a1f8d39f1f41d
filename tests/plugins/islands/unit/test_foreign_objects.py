"""Objects that no island has written: stray keys, garbage, and more than a memory holds."""

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
from composer_mesh.plugins.islands.rounds.all_reduce import Clock, ObjectStoreAllReduce
from composer_mesh.plugins.islands.rounds.fragment_sync import FragmentSync
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector, make_outer, outer_gradient
from composer_mesh.plugins.islands.rounds.rounds import RoundRules
from composer_mesh.plugins.islands.store.blobs import decide, decided, seal
from composer_mesh.plugins.islands.store.opening import open_store

SIZE = 700
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


def islands(store: Any, number: int = 2) -> list[ObjectStoreAllReduce]:
    clock = Clock(now=lambda: 0.0, sleep=lambda _: None)
    rules = RoundRules(number)
    return [
        ObjectStoreAllReduce(store, rank, number, rules=rules, clock=clock)
        for rank in range(number)
    ]


def hasty(store: Any) -> ObjectStoreAllReduce:
    """Return island 0, which waits for nobody."""
    clock = Clock(now=lambda: 0.0, sleep=lambda _: None)
    return ObjectStoreAllReduce(store, 0, 2, rules=RoundRules(2, deadline_s=0.0), clock=clock)


def closed_rounds(store: Any, rounds: int) -> list[ObjectStoreAllReduce]:
    both = islands(store)
    for base in range(rounds):
        for one in both:
            one.contribute(base, np.ones(SIZE, np.float32))
        both[0].close(base + 1, SIZE)
    return both


def test_stray_rounds_cost_no_reads_and_change_nothing() -> None:
    store = Counting()
    closed_rounds(store, 5)
    for name in STRAY:
        store.objects[f"all/rounds/{name}.0"] = b"stray"
    store.counts.clear()

    assert islands(store)[1].newest() == 5
    assert store.counts.total() <= 12


def test_stray_states_and_contributions_are_left_out() -> None:
    store = Counting()
    one, two = islands(store)
    for name in (*STRAY, "00000"):
        store.objects[f"all/contributions/00000000/{name}/x.0"] = b"stray"
        store.objects[f"all/contributions/{name}/00001.0"] = b"stray"
        store.objects[f"all/states/{name}/outer.0"] = b"stray"
    one.contribute(0, np.ones(SIZE, np.float32))
    two.contribute(0, np.ones(SIZE, np.float32))

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
    one, _ = islands(store)
    about = {"island": 1, "base": 0, "size": SIZE, "how": "none"}
    parts = [["all/x.parts/00000-0", 32 << 20, "0" * 64]] * 1000
    store.objects["all/contributions/00000000/00001.0"] = seal({"about": about, "parts": parts})
    one.contribute(0, np.ones(SIZE, np.float32))

    assert hasty(store).close(1, SIZE).islands == {0}
    assert store.counts["all/x"] == 0


@pytest.mark.parametrize("value", [3e38, -2e9])
def test_values_that_are_finite_but_of_no_training_make_no_mean(value: float) -> None:
    store = MemoryStore()
    one, two = islands(store)
    huge = np.full(SIZE, value, np.float32)
    with pytest.raises(ValueError, match="values like NaN"):
        two.contribute(0, huge)
    two.contribute_encoded(0, huge.tobytes(), SIZE)
    one.contribute(0, np.ones(SIZE, np.float32))
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
    one, _ = islands(store)
    sync = FragmentSync(one, make_outer(OuterSgd()), "member", lambda *_: None)
    store.objects["all/merges/member/0.0"] = seal({"round": "many"})

    sync.join(np.ones(SIZE, np.float32))

    assert sync.round == 0
