"""Power of the paired test: known values, a simulation, and what is said before a study starts."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.ablation.figures import mean_over_seeds
from composer_mesh.plugins.ablation.power import (
    Deviation,
    detectable,
    deviations_of,
    power_line,
    power_of,
)
from composer_mesh.plugins.ablation.report import earlier_deviation
from composer_mesh.services.directory.claim import RunDirectoryError


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 30])
def test_without_a_difference_a_fortieth_lies_beyond_either_end(seeds: int) -> None:
    assert power_of(0.0, 1.0, seeds) == pytest.approx(0.05, abs=1e-5)


@pytest.mark.parametrize(("seeds", "effect"), [(3, 3.26), (5, 1.68), (10, 0.996), (30, 0.529)])
def test_effects_are_those_of_tables_of_the_paired_t_test(seeds: int, effect: float) -> None:
    assert detectable(1.0, seeds) == pytest.approx(effect, abs=0.005)


def test_the_power_is_how_often_the_reports_interval_lacks_0() -> None:
    rng = random.Random(0)
    seen = 0
    for _ in range(4000):
        found = mean_over_seeds([rng.gauss(0.06, 0.04) for _ in range(5)])
        assert found is not None
        seen += not found.low <= 0 <= found.high
    assert seen / 4000 == pytest.approx(power_of(0.06, 0.04, 5), abs=0.025)


def test_more_seeds_and_less_deviation_see_less() -> None:
    found = [detectable(0.05, seeds) or 0.0 for seeds in (2, 3, 5, 10, 20)]
    assert found == sorted(found, reverse=True)
    assert detectable(0.1, 5) == pytest.approx(2 * (detectable(0.05, 5) or 0.0))
    assert detectable(0.05, 1) is None
    assert power_of(0.1, 0.0, 3) == 1


def test_a_test_of_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 seeds"):
        power_of(0.1, 0.1, 1)


def report_of(**arms: dict[str, float]) -> Any:
    return {"arms": {arm: {"mean_over_run": {"per_seed": own}} for arm, own in arms.items()}}


def test_the_deviation_of_earlier_runs_is_that_of_their_differences_by_seed(
    tmp_path: Path,
) -> None:
    neither = {"0": 0.2, "1": 0.3, "2": 0.5}
    sdpo, replay = {"0": 0.3, "1": 0.5, "2": 0.5}, {"0": 0.2, "2": 0.5}
    report = report_of(neither=neither, sdpo=sdpo, replay=replay)
    found = deviations_of([report], "here")
    assert [one.arm for one in found] == ["sdpo", "replay"]
    assert found[0].value == pytest.approx(statistics.stdev([0.1, 0.2, 0.0]))
    assert (found[0].seeds, found[1].seeds) == (3, 2)
    for content in (report, {"settings": [report_of(neither={}), report]}):
        (tmp_path / "ablation.json").write_text(json.dumps(content))
        other = earlier_deviation(tmp_path)
        assert other is not None
        assert (other.value, other.arm) == (found[0].value, "sdpo")
    (tmp_path / "ablation.json").write_text(json.dumps(report_of(neither=neither, both={"0": 1})))
    assert earlier_deviation(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"arms": {"both": 3}}', '{"settings": 4}'])
def test_what_is_no_report_of_an_ablation_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ablation.json").write_text(text)
    with pytest.raises(RunDirectoryError, match="is no report of an ablation"):
        earlier_deviation(tmp_path)


def test_the_line_says_what_it_rests_on() -> None:
    assert "can see no difference" in power_line(1, None)
    assert "1.68 times the standard deviation" in power_line(5, None)
    assert "8.4 points" in power_line(5, Deviation(0.05))
    assert "as stated" in power_line(5, Deviation(0.05))
    line = power_line(3, Deviation(0.05, "runs/a", "sdpo", 4))
    assert "from 4 seeds of sdpo in runs/a" in line
