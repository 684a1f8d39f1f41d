"""Blobs: parts, checksums, uploads that go on, folders that are removed.

Registers are decided once, also over stores that tear and repeat writes.
"""

from __future__ import annotations

import threading

import pytest
from islands_stores import Faults, FaultyStore, MemoryStore

from composer_mesh.plugins.islands.store.blobs import (
    ATTEMPTS,
    decide,
    decided,
    delete_folder,
    head_of,
    payload_of,
    put_blob,
    seal,
)
from composer_mesh.plugins.islands.store.opening import (
    CorruptObject,
    RetryingStore,
    StoreUnavailable,
)

PAYLOAD = bytes(range(256)) * 4


def test_a_blob_of_parts_is_read_back() -> None:
    store = MemoryStore()

    put_blob(store, "f/a", PAYLOAD, {"n": 1}, part_bytes=100)

    head = head_of(store, "f/a")
    assert head is not None
    assert (head.about, head.size, len(head.parts)) == ({"n": 1}, 1024, 11)
    assert payload_of(store, head, len(PAYLOAD)) == PAYLOAD


def test_an_empty_blob_is_read_back() -> None:
    store = MemoryStore()

    assert payload_of(store, put_blob(store, "f/a", b"", {}), 0) == b""


class Counting(MemoryStore):
    """Fails after some writes, and counts them."""

    def __init__(self, fails_after: int) -> None:
        super().__init__()
        self.left, self.written = fails_after, 0

    def put(self, key: str, data: bytes) -> None:
        if not self.left:
            raise StoreUnavailable("write", key, "the connection broke")
        self.left, self.written = self.left - 1, self.written + 1
        super().put(key, data)


def test_an_interrupted_upload_is_invisible_and_sends_no_part_twice() -> None:
    store = Counting(fails_after=6)
    with pytest.raises(StoreUnavailable):
        put_blob(store, "f/a", PAYLOAD, {}, part_bytes=100)
    assert head_of(store, "f/a") is None

    store.left = 100
    head = put_blob(store, "f/a", PAYLOAD, {}, part_bytes=100)

    assert store.written == 11
    assert payload_of(store, head, len(PAYLOAD)) == PAYLOAD


def test_a_second_blob_of_a_key_leaves_the_first_one() -> None:
    store = MemoryStore()
    put_blob(store, "f/a", PAYLOAD, {"n": 1})

    head = put_blob(store, "f/a", b"other", {"n": 2})

    assert (head.about, payload_of(store, head, len(PAYLOAD))) == ({"n": 1}, PAYLOAD)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:-1], "has 1023 bytes of 1024"),
        (lambda data: b"x" + data[1:], "wrong checksum"),
        (lambda _: None, "is gone"),
    ],
)
def test_a_changed_part_is_refused(change: object, why: str) -> None:
    store = MemoryStore()
    head = put_blob(store, "f/a", PAYLOAD, {})
    part = head.parts[0][0]
    changed = change(store.objects.pop(part))  # type: ignore[operator]
    if changed is not None:
        store.objects[part] = changed

    with pytest.raises(CorruptObject, match=why):
        payload_of(store, head, len(PAYLOAD))


def test_a_folder_is_removed_with_heads_first() -> None:
    class Deleting(MemoryStore):
        order: list[str] = []  # noqa: RUF012

        def delete(self, key: str) -> None:
            self.order.append(key)
            super().delete(key)

    store = Deleting()
    put_blob(store, "f/1/a", PAYLOAD, {}, part_bytes=600)
    put_blob(store, "f/2/a", PAYLOAD, {})

    delete_folder(store, "f/1/")

    assert store.order[0] == "f/1/a.0"
    assert len(store.order) == 3
    assert all(key.startswith("f/2/") for key in store.objects)


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
