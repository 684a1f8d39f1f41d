"""The benchmark of a trainer's GPU memory in the form that needs no GPU, and its cases."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.planning.memory import total
from composer_mesh.planning.memory_estimate import memory_of

ROOT = Path(__file__).parents[3]
BENCHMARK: Any = importlib.import_module("trainer_memory")


def test_a_case_trains_without_a_gpu_and_measures_nothing(tmp_path: Path) -> None:
    script, found = ROOT / "benchmarks" / "trainer_memory.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--dry", "--case", "muon", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["figures"]["muon: measured, GB"] == 0
    assert report["ratios"] == {}


def test_a_case_that_fails_has_no_figures(tmp_path: Path) -> None:
    assert BENCHMARK._run("--dry", "--folder", str(tmp_path), "--case", "muon") is None


@pytest.mark.parametrize("name", BENCHMARK.CASES)
def test_the_estimate_of_each_case_is_for_a_gpu(name: str, tmp_path: Path) -> None:
    config = BENCHMARK._config(tmp_path, name, dry=False)
    parts = memory_of("trainer", config, config.policy.sizes).gpu
    assert parts[0].what == "CUDA"
    assert total(parts) > 20 << 30
