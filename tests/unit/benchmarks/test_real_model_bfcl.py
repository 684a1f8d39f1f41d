"""The benchmark of the recipe on a real model compares its stages row by row."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARK: Any = importlib.import_module("real_model_bfcl")


def stage(right: int, minutes: float = 1.0) -> dict[str, Any]:
    """Figures of a stage in which the first `right` of ten rows succeed."""
    rows = {str(at): [at < right] for at in range(10)}
    success = {f"{kind}_success": right / 10 for kind in BENCHMARK.KINDS}
    return {
        **{f"{kind}_rows": rows for kind in BENCHMARK.KINDS},
        **success,
        "reward/mean": [0.1, 0.2],
        "deaths": [[0, "generator-1 killed"], [2, "controller $killed_"]],
        "minutes": minutes,
        "time/step_s": [60.0 * minutes] * 6,
        "peak_gb": None,
    }


def test_a_gain_is_paired_by_row_and_has_an_interval() -> None:
    before = stage(3)["greedy_rows"]
    assert BENCHMARK.gain(before, before) == (0.0, 0.0, 0.0)
    mean, low, high = BENCHMARK.gain(stage(7)["greedy_rows"], before)
    assert mean == pytest.approx(0.4)
    assert 0.0 < low < mean < high < 1.0


def test_stages_of_other_rows_are_not_compared() -> None:
    with pytest.raises(SystemExit, match="other rows"):
        BENCHMARK.gain({"0": [True]}, {"1": [True]})


def test_the_report_has_each_stage_s_gain_over_sft_and_the_curves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "stages"
    folder.mkdir()
    monkeypatch.setattr(BENCHMARK, "RESULTS", folder)
    stages = {"before": stage(0), "sft": stage(4), "rl-0": stage(6, 2.0), "trl": stage(5, 4.0)}
    for name, figures in stages.items():
        (folder / f"{name}.json").write_text(json.dumps({"figures": figures}), encoding="utf-8")
    BENCHMARK.report(found := tmp_path / "report.json")
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["figures"]["rl-0/sampled_gain"] == pytest.approx(0.2)
    assert report["figures"]["trl/greedy_gain"] == pytest.approx(0.1)
    assert report["ratios"] == {"first_steps_over_trl": 0.5}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_trl_the_ratio_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(BENCHMARK, "RESULTS", tmp_path)
    (tmp_path / "sft.json").write_text(json.dumps({"figures": stage(4)}), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        BENCHMARK.report(None)
    assert ended.value.code == 3
