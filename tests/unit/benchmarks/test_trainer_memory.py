"""The benchmark of a trainer's GPU memory in the form that needs no GPU, and its cases."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.planning.memory import total
from composer_mesh.planning.memory_estimate import memory_of

BENCHMARK: Any = importlib.import_module("trainer_memory")


def test_a_case_trains_without_a_gpu_and_measures_nothing(ranks: Any, tmp_path: Path) -> None:
    """In this process; `make gpu-day` without a GPU runs the whole script, and so does its test."""
    BENCHMARK.write_model(tmp_path, dry=True)
    found = BENCHMARK.measured(tmp_path, "muon", dry=True)
    assert set(found.values()) == {0.0}


def test_a_case_that_fails_has_no_figures(tmp_path: Path) -> None:
    assert BENCHMARK._run("--dry", "--folder", str(tmp_path), "--case", "muon") is None


@pytest.mark.parametrize("name", BENCHMARK.CASES)
def test_the_estimate_of_each_case_is_for_a_gpu(name: str, tmp_path: Path) -> None:
    config = BENCHMARK._config(tmp_path, name, dry=False)
    parts = memory_of("trainer", config, config.policy.sizes).gpu
    assert parts[0].what == "CUDA"
    assert total(parts) > 20 << 30
