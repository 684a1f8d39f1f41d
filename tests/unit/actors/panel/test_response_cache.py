"""The cache of answers: what is kept once stays, for every process, or the file is named."""

from __future__ import annotations

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.panel.panel import ResponseCache, content_key
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.pairs import TeacherAnswer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def answer(text: str) -> TeacherAnswer:
    message = {"role": "assistant", "content": text}
    return TeacherAnswer("a", text, message, usd=0.5, usd_known=False, latency_s=2.0, model="m")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(), st.text()), max_size=9))
def test_the_first_answer_to_a_key_comes_back_free_and_under_the_name_that_asks(
    kept: list[tuple[str, str]],
) -> None:
    expected: dict[str, TeacherAnswer] = {}
    with TemporaryDirectory() as folder:
        store = ResponseCache(Path(folder) / "c")
        for key, text in kept:
            store.put(key, answer(text))
            free = replace(answer(text), teacher="b", usd=0.0, usd_known=True, cached=True)
            expected.setdefault(key, free)
        assert {key: store.get(key, "b") for key in expected} == expected
        assert store.get("another " + "".join(expected), "b") is None
        store.close()


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_a_key_does_not_depend_on_the_order_of_keys(content: dict[str, object]) -> None:
    turned = dict(reversed(content.items()))
    assert content_key(content) == content_key(turned)
    assert content_key(content) != content_key([content])


def test_several_processes_connections_share_a_file(tmp_path: Path) -> None:
    stores = [ResponseCache(tmp_path / "deep" / "c") for _ in range(4)]

    def put(number: int) -> None:
        stores[number % 4].put(f"key {number % 50}", answer(f"text {number % 50}"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, range(200)))
    for store in stores:
        found = [store.get(f"key {number}", "a") for number in range(50)]
        texts = [one.action_text for one in found if one is not None]
        assert texts == [f"text {number}" for number in range(50)]
        store.close()


def test_its_file_is_its_owners_alone_and_an_older_mode_is_kept(tmp_path: Path) -> None:
    mine, older = tmp_path / "mine", tmp_path / "older"
    older.touch(0o640)
    older.chmod(0o640)
    for path in (mine, older):
        ResponseCache(path).close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    assert stat.S_IMODE(older.stat().st_mode) == 0o640


def test_a_file_that_cannot_be_a_cache_is_named_with_the_repair(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 40)
    Ledger(tmp_path / "ledger", BudgetRules(), "run").close()
    for name, reason in (("text", "not a database"), ("ledger", "of another kind")):
        with pytest.raises(StoreError, match=rf"cannot keep models' answers .*{reason}.*a\.key"):
            ResponseCache(tmp_path / name, "a.key")


@pytest.mark.parametrize("value", ["{", "nonsense", b"\xff\xfe", "[" * 100_000, '["no answer"]'])
def test_a_damaged_value_is_an_error_and_no_silent_miss(tmp_path: Path, value: object) -> None:
    store = ResponseCache(tmp_path / "c")
    with sqlite3.connect(tmp_path / "c") as rows:
        rows.execute("INSERT INTO kept VALUES ('k', ?)", (value,))
    rows.close()
    with pytest.raises(StoreError, match="the value of k is damaged"):
        store.get("k", "a")
    store.close()
