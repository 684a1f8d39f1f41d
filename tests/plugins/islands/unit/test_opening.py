"""Stores by their address: folders, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from islands_stores import Faults, FaultyStore, MemoryStore, UnconditionalStore

from composer_mesh.plugins.islands.store.opening import (
    StoreUnfit,
    check_conditional_writes,
    open_store,
)


def test_a_folder_is_a_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/new")

    assert store.put_new("a/b.0", b"1")
    assert not store.put_new("a/b.0", b"2")
    store.put("a/c", b"333")
    assert (store.get("a/b.0"), store.get("a/none"), store.size("a/c")) == (b"1", None, 3)
    assert store.size("none") is None
    assert sorted(store.keys("a/")) == ["a/b.0", "a/c"]
    assert list(store.keys("none/")) == []
    store.delete("a/c")
    store.delete("a/c")
    assert list(store.keys("a/")) == ["a/b.0"]


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("file://relative/folder", "must have an absolute path"),
        ("ftp://host/folder", "is not an address of an object store"),
    ],
)
def test_an_address_that_is_none_is_refused(uri: str, why: str) -> None:
    with pytest.raises(StoreUnfit, match=why):
        open_store(uri)


def test_a_store_without_conditional_writes_is_refused() -> None:
    with pytest.raises(StoreUnfit, match="accepted two conditional writes"):
        check_conditional_writes(UnconditionalStore(), "s3://bucket")


def test_a_store_that_takes_nothing_is_refused_with_its_reason() -> None:
    with pytest.raises(StoreUnfit, match="503 Slow Down"):
        check_conditional_writes(FaultyStore(MemoryStore(), Faults(refused=1.0), 0), "s3://b")
