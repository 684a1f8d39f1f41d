"""Runs of earlier reports: what counts, what is left to train, and which reports are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_ablations import PricedRuns
from repository import ROOT

from composer_mesh.plugins.ablation.command import ablate_command, merged_runs
from composer_mesh.plugins.ablation.plan import Study, Varied, plan_study
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.cli import main

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
    with pytest.raises(UsageError, match="is no report of an ablation"):
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
