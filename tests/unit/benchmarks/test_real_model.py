"""The benchmark of a real model says what is missing without one; its parts run on any."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.actors.models.policy import save_policy

BENCHMARK: Any = importlib.import_module("real_model")
TINY = BENCHMARK.Effort(1, 12, 4, 64)


def test_without_a_model_every_ratio_is_missing_with_status_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["real_model.py", str(tmp_path), "--json", str(found)])
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.main()
    assert ended.value.code == 3
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["ratios"] == {}
    assert all("no model in" in reason for reason in report["missing"].values())


def test_both_ways_of_generation_and_of_training_work_on_a_small_model(
    build_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "policy"
    save_policy(build_model(1), tokenizer, folder)
    monkeypatch.setattr(BENCHMARK, "FULL", TINY)
    monkeypatch.setattr(BENCHMARK, "LARGEST_ID", 100)
    report = BENCHMARK.Report("real_model")
    BENCHMARK.compare(report, "generation", BENCHMARK.generation(folder, "float32"), TINY)
    BENCHMARK.compare(report, "training", BENCHMARK.training(folder, TINY), TINY)
    assert set(report.ratios) == {"generation", "training"}
    assert len(report.figures) == 4
