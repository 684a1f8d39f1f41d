"""Figures over seeds: the quantile is Student's, no interval is too narrow, "never" comes last.

Power of the paired test: known values, a simulation, and what is said before a study starts.
Runs of earlier reports: what counts, what is left to train, and which reports are refused.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_ablations import PricedRuns
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from composer_mesh.plugins.ablation.command import ablate_command, merged_runs
from composer_mesh.plugins.ablation.figures import (
    Deviation,
    curve,
    detectable,
    deviations_of,
    mean_over_run,
    mean_over_seeds,
    median_steps,
    paired,
    power_line,
    power_of,
    steps_to,
    success_over_seeds,
    t_quantile,
)
from composer_mesh.plugins.ablation.plan import Study, Varied, plan_study
from composer_mesh.plugins.ablation.report import earlier_deviation
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import Evaluation, wilson_interval

EPISODES = 50
shares = st.integers(0, EPISODES).map(lambda wins: wins / EPISODES)


def upper_tail(value: float, degrees: int) -> float:
    """P(T > value) of Student's distribution, by Simpson's rule over the density from 0."""
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log_scale) / math.sqrt(degrees * math.pi)
    count = 4000
    width = value / count
    total = 0.0
    for place in range(count + 1):
        weight = 1 if place in (0, count) else 4 if place % 2 else 2
        total += weight * (1 + (place * width) ** 2 / degrees) ** (-(degrees + 1) / 2)
    return 0.5 - scale * total * width / 3


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 11, 12, 20, 50, 200])
def test_beyond_the_quantile_lies_a_fortieth_of_students_distribution(degrees: int) -> None:
    assert upper_tail(t_quantile(degrees), degrees) == pytest.approx(0.025, abs=1e-5)


def test_a_quantile_without_degrees_of_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        t_quantile(0)


def test_three_seeds_give_the_interval_of_a_textbook() -> None:
    estimate = mean_over_seeds([0.6, 0.7, 0.8])
    assert estimate is not None
    assert estimate.mean == pytest.approx(0.7)
    assert estimate.high - estimate.mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert mean_over_seeds([0.6]) is None


@given(st.lists(shares, min_size=1, max_size=6))
def test_the_interval_holds_the_mean_and_is_never_narrower_than_wilsons(
    successes: list[float],
) -> None:
    estimate = success_over_seeds([Evaluation(0, share, EPISODES) for share in successes])
    low, high = wilson_interval(estimate.mean, EPISODES * len(successes))
    assert 0 <= estimate.low <= low <= high <= estimate.high <= 1
    assert estimate.low <= estimate.mean <= estimate.high


def test_seeds_that_differ_widen_the_interval_beyond_the_episodes() -> None:
    alike = success_over_seeds([Evaluation(0, 0.5, 1000)] * 3)
    apart = success_over_seeds([Evaluation(0, share, 1000) for share in (0.3, 0.5, 0.7)])
    assert alike.mean == pytest.approx(apart.mean)
    assert apart.high - apart.low > 5 * (alike.high - alike.low)


def test_one_seed_has_the_interval_of_its_episodes() -> None:
    one = success_over_seeds([Evaluation(0, 0.5, 200)])
    assert (one.low, one.high) == wilson_interval(0.5, 200)


def test_a_curve_has_the_steps_that_all_seeds_have() -> None:
    runs = {
        0: [Evaluation(step, 0.5, 10) for step in (0, 2, 4)],
        1: [Evaluation(step, 0.7, 10) for step in (0, 4)],
    }
    points = curve(runs)
    assert [point.step for point in points] == [0, 4]
    assert [point.success.mean for point in points] == pytest.approx([0.6, 0.6])
    assert curve({}) == []


def test_the_target_is_reached_at_the_first_evaluation_that_shows_it() -> None:
    run = [Evaluation(step, share, 10) for step, share in ((0, 0.2), (5, 0.8), (10, 0.7))]
    assert steps_to(run, 0.8) == 5
    assert steps_to(run, 0.81) is None
    assert steps_to(run, 0.1) == 0


@pytest.mark.parametrize(
    ("steps", "median"),
    [
        ([10, 20, 60], 20),
        ([10, None, 20], 20),
        ([None, None, 20], None),
        ([10, None], None),
        ([10, 20], 15),
        ([], None),
    ],
)
def test_never_is_later_than_any_step(steps: list[int | None], median: float | None) -> None:
    assert median_steps(steps) == median


def test_the_mean_over_a_run_weighs_steps_and_not_evaluations() -> None:
    run = [Evaluation(step, share, 10) for step, share in ((0, 0.0), (2, 1.0), (10, 1.0))]
    assert mean_over_run(run) == pytest.approx(0.9)
    assert mean_over_run(run[:1]) == 0.0


def test_differences_are_those_of_the_seeds_that_both_have() -> None:
    assert paired({0: 0.5, 1: 0.75, 2: 1.0}, {2: 0.5, 0: 0.25}) == [0.25, 0.5]


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
    with pytest.raises(RunDirectoryError, match="is not a report of an ablation"):
        earlier_deviation(tmp_path)


def test_the_line_says_what_it_rests_on() -> None:
    assert "can see no difference" in power_line(1, None)
    assert "1.68 times the standard deviation" in power_line(5, None)
    assert "8.4 points" in power_line(5, Deviation(0.05))
    assert "as stated" in power_line(5, Deviation(0.05))
    line = power_line(3, Deviation(0.05, "runs/a", "sdpo", 4))
    assert "from 4 seeds of sdpo in runs/a" in line


QUICKSTART = ROOT / "configs" / "quickstart.toml"


ARMS = ("neither", "both")


def study(seeds: tuple[int, ...], turns: str = "4,6", steps: int = 4, every: int = 2) -> Study:
    levels = Varied.parse(f"environment.max_turns={turns}", "--difficulty")
    return plan_study([QUICKSTART], [f"run.steps={steps}"], ARMS, seeds, every, difficulty=levels)


def report(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "ablation.json").read_text())
    return found


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ablation of seeds 0 and 1 at one difficulty; tests only read it."""
    output = tmp_path_factory.mktemp("elsewhere")
    assert ablate_command(study((0, 1), "4"), output, PricedRuns()) == 0
    return output


def test_runs_of_two_machines_make_the_report_of_one(elsewhere: Path, tmp_path: Path) -> None:
    whole, rest = study((0, 1, 2)), PricedRuns()
    assert ablate_command(whole, tmp_path / "one", PricedRuns()) == 0
    merged = merged_runs(whole, [elsewhere])
    assert ablate_command(whole, tmp_path / "two", rest, merged=merged) == 0
    one, two = (report(tmp_path / name) for name in ("one", "two"))
    assert one == two
    places = [place.relative_to(tmp_path / "two") for place in rest.trained]
    assert set(places) == {run.place for run in whole.runs} - merged.keys()
    assert len(places) == 12 - 4


def test_a_merged_report_can_be_merged_itself(elsewhere: Path, tmp_path: Path) -> None:
    more = study((0, 1, 2), "4")
    assert (
        ablate_command(more, tmp_path / "first", PricedRuns(), merged=merged(more, elsewhere)) == 0
    )
    again, output = PricedRuns(), tmp_path / "second"
    output.mkdir()  # nothing is trained there
    found = merged(more, tmp_path / "first" / "ablation.json")
    assert ablate_command(more, output, again, merged=found) == 0
    assert again.trained == []
    assert report(tmp_path / "first") == report(output)


def merged(wanted: Study, *reports: Path) -> Mapping[Path, Any]:
    return merged_runs(wanted, reports)


def test_a_run_of_this_directory_counts_before_that_of_a_report(
    elsewhere: Path, tmp_path: Path
) -> None:
    own = study((0,), "4")
    assert ablate_command(own, tmp_path, PricedRuns()) == 0
    (place,) = tmp_path.glob("*/both/seed-0/summary.json")
    place.write_text(json.dumps({"wall_s": 77.0}))
    assert ablate_command(own, tmp_path, PricedRuns(), merged=merged(own, elsewhere)) == 0
    (setting,) = report(tmp_path)["settings"]
    assert [run["wall_s"] for run in setting["runs"]] == [9.0, 77.0]


@pytest.mark.parametrize(
    ("other", "section"),
    [({"steps": 6}, "run"), ({"turns": "5"}, "environment"), ({"every": 1}, "--eval-every")],
)
def test_a_report_of_another_ablation_is_refused(
    elsewhere: Path, other: dict[str, Any], section: str
) -> None:
    with pytest.raises(UsageError, match=rf"has no setting of this ablation \({section} differ\)"):
        merged_runs(study((0, 1), **{"turns": "4", **other}), [elsewhere])


def test_a_run_that_two_reports_hold_is_refused(elsewhere: Path) -> None:
    with pytest.raises(UsageError, match="neither, seed 0, which an earlier one holds too"):
        merged_runs(study((0, 1)), [elsewhere, elsewhere])


@pytest.mark.parametrize("text", ["", "{}", '{"settings": [{"base": {}}]}', '{"settings": 3}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ablation.json").write_text(text)
    with pytest.raises(UsageError, match="is not a report of an ablation"):
        merged_runs(study((0,)), [tmp_path])


def test_a_finished_run_without_its_last_evaluation_is_refused(
    elsewhere: Path, tmp_path: Path
) -> None:
    content = report(elsewhere)
    content["settings"][0]["runs"][0]["evaluations"].pop()
    (tmp_path / "ablation.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="its last evaluation is not after step 4"):
        merged_runs(study((0,)), [tmp_path])


def test_an_unfinished_run_of_a_report_is_left_to_train(tmp_path: Path) -> None:
    wanted = study((0, 1), "4")
    assert ablate_command(wanted, tmp_path / "half", PricedRuns(ends={2: 1})) == 1
    found = merged(wanted, tmp_path / "half")
    assert {(one.run.arm, one.run.seed) for one in found.values()} == {
        *(("neither", 0), ("neither", 1), ("both", 1))
    }


def test_the_command_takes_reports(
    elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--arms", "neither,both", "--seeds", "0,1,2", "--eval-every", "2"]
    options += ["--set", "run.steps=4", "--difficulty", "environment.max_turns=4,6"]
    options += ["--merge", str(elsewhere), "--output", str(tmp_path / "out"), "--dry-run"]
    assert main(["ablate", str(QUICKSTART), *options]) == 0
    assert "12 runs, 4 of them finished" in capsys.readouterr().out
