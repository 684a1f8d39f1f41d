"""Several settings: what is planned and refused, how runs go on, and what the page shows.

A channel of a user's own has an arm as ours have.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from fake_ablations import FakeRuns, PricedRuns, success
from guides import Guide
from repository import ROOT
from supervised_runs import supervised

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.ablation.command import ablate_command
from composer_mesh.plugins.ablation.plan import Study, Varied, plan_ablation, plan_study
from composer_mesh.plugins.ablation.report import outcomes
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.directory.sft_start import started
from composer_mesh.services.store.writing import RunStore

QUICKSTART = ROOT / "configs" / "quickstart.toml"
LEVELS = Varied.parse("environment.max_turns=4,6", "--difficulty")


def study(**changes: Any) -> Study:
    wanted: dict[str, Any] = {
        "files": [QUICKSTART],
        "overrides": ["run.steps=4"],
        "arms": ("neither", "both"),
        "seeds": (0, 1),
        "eval_every": 2,
    }
    return plan_study(**wanted | changes)


def test_one_config_without_varied_keys_has_the_directories_of_a_single_ablation() -> None:
    assert study().single
    assert [str(run.place) for run in study().runs] == [
        *("neither/seed-0", "both/seed-0", "neither/seed-1", "both/seed-1")
    ]


def test_all_combinations_are_planned_seed_by_seed() -> None:
    planned = study(
        varied=[Varied.parse("trainer.lr=1e-4,3e-4")], difficulty=LEVELS, arms=("neither",)
    )
    names = [one.setting for one in planned.settings]
    assert names == [
        "quickstart-lr-1e-4-max_turns-4",
        "quickstart-lr-1e-4-max_turns-6",
        "quickstart-lr-3e-4-max_turns-4",
        "quickstart-lr-3e-4-max_turns-6",
    ]
    assert planned.difficulty == "environment.max_turns"
    places = [run.place for run in planned.runs]
    assert places == [Path(name, "neither", f"seed-{seed}") for seed in (0, 1) for name in names]
    values = {(one.base.trainer.lr, one.base.environment.max_turns) for one in planned.settings}
    assert values == {(1e-4, 4), (1e-4, 6), (3e-4, 4), (3e-4, 6)}
    runs = {run.config.run.name for run in planned.runs}
    assert len(runs) == len(places)


def test_several_configs_are_settings_of_their_own(tmp_path: Path) -> None:
    other = tmp_path / "harder.toml"
    other.write_text(QUICKSTART.read_text())
    planned = study(files=[QUICKSTART, other])
    assert [one.setting for one in planned.settings] == ["quickstart", "harder"]


def test_settings_of_the_same_directory_are_refused(tmp_path: Path) -> None:
    other = tmp_path / QUICKSTART.name
    other.write_text(QUICKSTART.read_text())
    with pytest.raises(ConfigError, match="two settings have the directory 'quickstart'"):
        study(files=[QUICKSTART, other])


def test_a_dry_run_says_what_would_be_run_and_seen_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--dry-run", "--seeds", "0,1,2,3,4", "--deviation", "4", "--vary", "trainer.lr=1,2"]
    assert main(["ablate", str(QUICKSTART), *options]) == 0
    said = capsys.readouterr().out
    assert "40 runs, 0 of them finished" in said
    assert "quickstart-lr-1: neither, sdpo, replay, both; seeds 0, 1, 2, 3, 4; 70 steps" in said
    assert "5 seeds can see a difference of 6.7 points" in said
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ablation over a difficulty that has ended; tests only read it."""
    output = tmp_path_factory.mktemp("study")
    assert ablate_command(study(difficulty=LEVELS), output, PricedRuns(), "the power", 36.0) == 0
    return output


def test_a_report_holds_every_setting(finished: Path) -> None:
    report = json.loads((finished / "ablation.json").read_text())
    assert report["difficulty"] == "environment.max_turns"
    assert [one["values"] for one in report["settings"]] == [
        {"environment.max_turns": "4"},
        {"environment.max_turns": "6"},
    ]
    assert {run["state"] for one in report["settings"] for run in one["runs"]} == {"finished"}


def test_the_page_has_the_power_the_tables_and_pictures_that_exist(finished: Path) -> None:
    page = (finished / "ablation.md").read_text()
    assert "the power." in page
    assert "## Held-out success by environment.max_turns, after the last step" in page
    assert "| environment.max_turns | neither | both |" in page
    assert "| steps to 80% |" in page
    names = [line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("!")]
    assert len(names) == 3
    for name in names:
        head = (finished / name).read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:24])) > 100


def test_a_point_of_success_has_its_price(finished: Path) -> None:
    (setting, _) = json.loads((finished / "ablation.json").read_text())["settings"]
    cost = setting["arms"]["both"]["cost"]
    # 8 s at 36 dollars an hour are 0.08 dollars; both gain min(1, ...) - start over two seeds.
    assert cost["mean"] == pytest.approx({"tokens": 400, "seconds": 8, "usd": 3.08})
    ends = [one["evaluations"] for one in setting["runs"] if one["arm"] == "both"]
    points = sum(100 * (run[-1]["success"] - run[0]["success"]) for run in ends)
    assert cost["per_point"]["tokens"] == pytest.approx(800 / points)
    assert cost["per_point"]["usd"] == pytest.approx(6.16 / points)


def test_nothing_gained_has_no_price_of_a_point(tmp_path: Path) -> None:
    class Flat(PricedRuns):
        def __call__(self, config: Config, place: Path, resumed: Any = None) -> int:
            super().__call__(config, place, resumed)
            lines = [f'{{"step": {n}, "success": 0.5, "episodes": 20}}\n' for n in (0, 2, 4)]
            (place / "evaluations.jsonl").write_text("".join(lines))
            return 0

    assert ablate_command(study(), tmp_path, Flat()) == 0
    cost = json.loads((tmp_path / "ablation.json").read_text())["arms"]["both"]["cost"]
    assert cost["per_point"] is None
    assert cost["mean"]["tokens"] == 400


def test_steps_are_compared_by_seed_and_never_counts_the_whole_run(tmp_path: Path) -> None:
    planned = study(target=0.9, overrides=["run.steps=6"])
    assert ablate_command(planned, tmp_path, FakeRuns()) == 0
    arms = json.loads((tmp_path / "ablation.json").read_text())["arms"]
    assert arms["neither"]["steps_to_target"]["per_seed"] == {"0": None, "1": None}
    assert arms["both"]["steps_to_target"]["per_seed"] == {"0": 4, "1": 4}
    assert arms["both"]["steps_minus_neither"]["mean"] == -2
    assert arms["neither"]["steps_minus_neither"] is None
    last = [success(run.config, 6) for run in planned.runs if run.arm == "both"]
    assert arms["both"]["final"]["mean"] == pytest.approx(sum(last) / 2)


def test_an_interrupted_study_has_whole_seeds_and_resumes_the_half_run(tmp_path: Path) -> None:
    planned = study(difficulty=LEVELS)
    first, second = FakeRuns(ends={6: 130}), FakeRuns()
    assert ablate_command(planned, tmp_path, first) == 130
    report = json.loads((tmp_path / "ablation.json").read_text())
    for setting in report["settings"]:
        assert next(iter(setting["arms"]["neither"]["final"]["per_seed"])) == "0"
    assert ablate_command(planned, tmp_path, second) == 0
    assert second.trained == [tmp_path / run.place for run in planned.runs[5:]]
    assert second.resumed == second.trained[:1]


def test_a_half_run_that_cannot_be_resumed_is_moved_aside_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = study()
    place = tmp_path / planned.runs[0].place
    with RunStore(place, planned.runs[0].config) as store:
        store.add_evaluation(Evaluation(0, 0.2, 20))
    (place / "run.sqlite").unlink()
    (place / "metrics.jsonl").write_text('{"step": 1}\n')
    runs = FakeRuns()
    assert ablate_command(planned, tmp_path, runs) == 0
    assert runs.resumed == []
    said = capsys.readouterr().out
    assert "begins anew: --resume" in said
    assert (tmp_path / "neither" / "seed-0.1" / "metrics.jsonl").exists()


def test_figures_of_a_run_that_are_no_amounts_are_refused(tmp_path: Path) -> None:
    planned = study()
    assert ablate_command(planned, tmp_path, PricedRuns()) == 0
    metrics = tmp_path / planned.runs[0].place / "metrics.jsonl"
    metrics.write_text('{"step": 1, "tokens/trained": "many"}\n')
    with pytest.raises(RunDirectoryError, match="tokens/trained that is not an amount"):
        outcomes(list(planned.runs), tmp_path)


def test_all_runs_start_from_the_supervised_run_of_the_config(tmp_path: Path) -> None:
    sets = ["sft.steps=1", "sft.demonstrations=8"]
    run = supervised(load_config(QUICKSTART, sets), tmp_path / "fine-tuned", 1)
    planned = study(overrides=[*sets, "run.steps=4", f"policy.start=sft:{run}"])
    folder = run / "checkpoints" / "step-1"
    assert {one.config.policy.path for one in planned.runs} == {folder}
    for one in planned.runs:
        assert started(one.config) == one.config


(MODULE,) = Guide.read("channels.md").blocks("python")
"""The channel of the docs page."""


def test_a_channel_of_a_users_own_is_an_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_channel.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    file = ROOT / "configs" / "quickstart.toml"
    settings = [
        "run.steps=6",
        "channels.observations.import_path=users_channel:Observations",
        "channels.observations.weight=0.5",
    ]
    plan = plan_ablation(file, settings, ("neither", "observations", "both"), (0,))
    base = load_config(file, settings)
    weights = [
        (one.config.sdpo.alpha, one.config.replay.beta, one.config.channels["observations"].weight)
        for one in plan.runs
    ]
    assert weights == [(0, 0, 0), (0, 0, 0.5), (base.sdpo.alpha, base.replay.beta, 0)]
