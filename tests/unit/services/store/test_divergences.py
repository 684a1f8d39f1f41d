"""Divergences of hinted turns come back in half precision; a repeated step replaces its own."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.store.row_values import divergences_row, half_precision
from composer_mesh.services.store.rows import DamagedRecord
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore

VALUES = st.lists(st.floats(-9, 9, width=16), max_size=5).map(lambda values: array("f", values))
ONE = TurnDivergences("t", 0, array("f", [0.5, 0.25]))


@given(VALUES)
def test_values_come_back_as_they_were(values: array[float]) -> None:
    assert divergences_row((1, 0, "t", 2, half_precision(values))) == TurnDivergences(
        "t", 2, values
    )


def test_numbers_outside_of_half_precision_are_its_largest() -> None:
    row = (1, 0, "t", 0, half_precision([1e9, -1e9, float("inf"), -float("inf")]))
    assert list(divergences_row(row).values) == [65504, -65504, 65504, -65504]


@pytest.mark.parametrize("body", [b"x", "text", 5, None])
def test_a_body_that_holds_no_numbers_is_damaged(body: object) -> None:
    with pytest.raises(DamagedRecord, match="table divergences, row 1 is damaged"):
        divergences_row((1, 0, "t", 0, body))


async def test_a_run_stores_them_with_its_steps(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    root = tmp_path / "run"
    with RunStore(root, build_config()) as store:
        store.add_divergences(0, [ONE])
        store.add_divergences(0, [ONE, ONE])
        store.add_divergences(1, [ONE])
        await store.supersede(1)
        found = [store.reading.divergences(step) for step in range(2)]
    assert found == [[ONE, ONE], []]
    assert verify_run(root) == []
    with sqlite3.connect(root / "run.sqlite") as rows:
        rows.create_function("seal_of", -1, lambda *_: 0)
        rows.execute("UPDATE divergences SET body = x'0000'")
    rows.close()
    assert {one.kind for one in verify_run(root)} == {"damaged"}
