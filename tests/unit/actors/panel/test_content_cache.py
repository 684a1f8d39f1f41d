"""The content cache: what is kept once stays, for every process, or the file is named."""

from __future__ import annotations

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.actors.hint_writer import HintCache
from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.panel.response_cache import ContentCache, content_key
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import BudgetRules

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def cache(path: Path) -> ContentCache:
    return ContentCache(path, what="answers", setting="replay.cache")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(), JSON.filter(lambda value: value is not None)), max_size=9))
def test_the_first_value_of_a_key_comes_back_as_it_was(kept: list[tuple[str, Any]]) -> None:
    expected: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        store = cache(Path(folder) / "c")
        for key, value in kept:
            store.put(key, value)
            expected.setdefault(key, value)
        assert {key: store.get(key) for key in expected} == expected
        assert store.get("another " + "".join(expected)) is None
        store.close()


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_a_key_does_not_depend_on_the_order_of_keys(content: dict[str, Any]) -> None:
    turned = dict(reversed(content.items()))
    assert content_key(content) == content_key(turned)
    assert content_key(content) != content_key([content])


def test_several_processes_connections_share_a_file(tmp_path: Path) -> None:
    stores = [cache(tmp_path / "deep" / "c") for _ in range(4)]

    def put(number: int) -> None:
        stores[number % 4].put(f"key {number % 50}", number % 50)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, range(200)))
    for store in stores:
        assert [store.get(f"key {number}") for number in range(50)] == list(range(50))
        store.close()
    again = cache(tmp_path / "deep" / "c")
    assert again.get("key 7") == 7
    again.close()


def test_its_file_is_its_owners_alone_and_an_older_mode_is_kept(tmp_path: Path) -> None:
    mine, older = tmp_path / "mine", tmp_path / "older"
    older.touch(0o640)
    older.chmod(0o640)
    for path in (mine, older):
        cache(path).close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    assert stat.S_IMODE(older.stat().st_mode) == 0o640


def test_a_file_that_cannot_be_a_cache_is_named_with_the_repair(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 40)
    Ledger(tmp_path / "ledger", BudgetRules(), "run").close()
    for name, reason in (("text", "not a database"), ("ledger", "of another kind")):
        with pytest.raises(StoreError, match=rf"cannot keep answers .*{reason}.*replay\.cache"):
            cache(tmp_path / name)


def test_a_file_of_another_version_is_not_misread(tmp_path: Path) -> None:
    cache(tmp_path / "c").close()
    with sqlite3.connect(tmp_path / "c") as rows:
        rows.execute("PRAGMA user_version = 2")
    rows.close()
    with pytest.raises(StoreError, match="its version is 2, not 1"):
        cache(tmp_path / "c")


@pytest.mark.parametrize("value", ["{", "nonsense", b"\xff\xfe", "[" * 100_000])
def test_a_damaged_value_is_an_error_and_no_silent_miss(tmp_path: Path, value: object) -> None:
    store = cache(tmp_path / "c")
    with sqlite3.connect(tmp_path / "c") as rows:
        rows.execute("INSERT INTO kept VALUES ('k', ?)", (value,))
    rows.close()
    with pytest.raises(StoreError, match="the value of k is damaged"):
        store.get("k")
    store.close()


def test_hints_are_sentences(tmp_path: Path) -> None:
    store = cache(tmp_path / "c")
    store.put("k", ["not a sentence"])
    store.close()
    hints = HintCache(tmp_path / "c")
    with pytest.raises(StoreError, match="cannot keep hints"):
        hints.get("k")
    hints.close()
