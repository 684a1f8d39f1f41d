"""The file of a step's divergences: they come back in half precision, or it is damaged."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.store.divergence_files import (
    divergences_path,
    read_divergences,
    write_divergences,
)
from composer_mesh.services.store.rows import DamagedRecord
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore

VALUES = st.lists(st.floats(-9, 9, width=16), max_size=5).map(lambda values: array("f", values))
TURNS = st.builds(TurnDivergences, st.text(max_size=8), st.integers(0, 99), VALUES)
ONE = TurnDivergences("t", 0, array("f", [0.5, 0.25]))


@given(st.lists(TURNS, max_size=5))
def test_divergences_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, found: list[TurnDivergences]
) -> None:
    root = tmp_path_factory.mktemp("run")
    write_divergences(root, 1234, found)
    assert read_divergences(root, 1234) == found


def test_numbers_outside_of_half_precision_are_its_largest(tmp_path: Path) -> None:
    write_divergences(tmp_path, 0, [TurnDivergences("t", 0, array("f", [1e9, -1e9, float("inf")]))])
    assert list(read_divergences(tmp_path, 0)[0].values) == [65504, -65504, 65504]


def test_a_step_without_a_file_has_none(tmp_path: Path) -> None:
    assert read_divergences(tmp_path, 7) == []


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.zeros(3, np.float16)},
        {"values": np.zeros((2, 1), np.float16)},
        {"values": np.zeros(2, np.float64)},
        {"turns": np.zeros(2, np.int32)},
        {"lengths": np.array([-2], np.int32)},
        {"body": np.frombuffer(b'["a", "b"]', np.uint8)},
        {"body": np.frombuffer(b"{", np.uint8)},
        {"more": np.zeros(1, np.int32)},
    ],
)
def test_a_file_whose_arrays_do_not_fit_is_damaged(
    tmp_path: Path, change: dict[str, np.ndarray]
) -> None:
    write_divergences(tmp_path, 0, [ONE])
    path = divergences_path(tmp_path, 0)
    path.write_bytes(save({**load(path.read_bytes()), **change}))
    with pytest.raises(DamagedRecord, match="is damaged"):
        read_divergences(tmp_path, 0)


def test_a_run_stores_them_beside_what_it_needs(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    root = tmp_path / "run"
    with RunStore(root, build_config()) as store:
        store.add_divergences(0, [ONE])
        store.add_divergences(0, [ONE, ONE])
    assert read_divergences(root, 0) == [ONE, ONE]
    assert verify_run(root) == []
