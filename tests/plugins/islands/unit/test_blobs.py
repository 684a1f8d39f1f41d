"""Blobs: parts, checksums, uploads that go on, folders that are removed."""

from __future__ import annotations

import pytest
from islands_stores import MemoryStore

from composer_mesh.plugins.islands.store.blobs import delete_folder, head_of, payload_of, put_blob
from composer_mesh.plugins.islands.store.port import CorruptObject, StoreUnavailable

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
