"""An ablation on runs that are fakes: which runs it is made of, and what a second command keeps."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_ablations import FakeRuns
from repository import ROOT
from rich.console import Console

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.ablation.command import ablate_command
from composer_mesh.plugins.ablation.page import notes, report_table
from composer_mesh.plugins.ablation.plan import Ablation, Study, plan_ablation, refuse_other_runs
from composer_mesh.plugins.ablation.report import ablation_report
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.status import RunStatus, newest_run, write_status

QUICKSTART = ROOT / "configs" / "quickstart.toml"
Settings = dict[str, Any]


def settings_of(config: Config) -> Settings:
    return {
        "run.seed": config.run.seed,
        "sdpo.alpha": config.sdpo.alpha,
        "replay.beta": config.replay.beta,
        "eval.every": config.eval.every,
    }


@pytest.fixture(scope="module")
def plan() -> Ablation:
    """Six steps, evaluated after every second one."""
    return plan_ablation(QUICKSTART, ["run.steps=6"], seeds=(0, 1), eval_every=2)


def test_runs_differ_only_in_seed_weights_name_and_evaluation() -> None:
    base = load_config(QUICKSTART, ["run.steps=20"])
    plan = plan_ablation(QUICKSTART, ["run.steps=20"])
    assert [str(run) for run in plan.runs[:5]] == [
        *("neither, seed 0", "sdpo, seed 0", "replay, seed 0", "both, seed 0", "neither, seed 1")
    ]
    assert len(plan.runs) == 12
    for run in plan.runs:
        assert settings_of(run.config) == {
            "run.seed": run.seed,
            "sdpo.alpha": base.sdpo.alpha if run.arm in ("sdpo", "both") else 0,
            "replay.beta": base.replay.beta if run.arm in ("replay", "both") else 0,
            "eval.every": 2,
        }
        theirs, ours = run.config.model_dump(), base.model_dump()
        for section, key in (("run", "seed"), ("run", "name"), ("eval", "every")):
            theirs[section].pop(key), ours[section].pop(key)
        for section, key in (("sdpo", "alpha"), ("replay", "beta")):
            theirs[section].pop(key), ours[section].pop(key)
        assert theirs == ours


@pytest.mark.parametrize(
    ("overrides", "asked", "every"),
    [
        (["run.steps=70"], None, 7),
        (["run.steps=3"], None, 1),
        (["run.steps=70", "eval.every=5"], None, 5),
        (["run.steps=70", "eval.every=5"], 2, 2),
    ],
)
def test_evaluation_is_a_tenth_of_the_run_unless_it_is_set(
    overrides: list[str], asked: int | None, every: int
) -> None:
    plan = plan_ablation(QUICKSTART, overrides, ("neither",), (0,), asked)
    assert plan.eval_every == every


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "neither,full"], "'full' but an arm is one of neither, sdpo, replay, both"),
        (["--arms", ""], "needs one value or more"),
        (["--seeds", "0,1,1"], "each once"),
        (["--seeds", "0,x"], "whole numbers"),
        (["--seeds", "-1"], "run.seed = -1"),
        (["--eval-every", "0"], "must be 1 step or more"),
        (["--set", "run.seed=3"], "name the seeds with --seeds"),
        (["--set", "cluster.kind=slurm"], "a worker serves one run"),
        (["--set", "sdpo.alpha=0"], "arm 'sdpo' needs the channel"),
        (["--set", "replay.beta=0", "--arms", "both"], "arm 'both' needs the channel"),
        (["--vary", "trainer.lr"], "must be a key and its values"),
        (["--vary", "trainer.lr=1e-4,"], "must be a key and its values"),
        (["--vary", "run.seed=1,2"], "use --seeds"),
        (["--vary", "eval.every=1,2"], "use --eval-every"),
        (["--vary", "trainer.lr=1e-4,1e-4"], "needs each value once"),
        (["--vary", "trainer.lr=1", "--difficulty", "trainer.lr=2"], "given twice"),
        (["--vary", "trainer.lr=1", "--set", "trainer.lr=2"], "given twice"),
        (["--difficulty", "loss.type=grpo,cispo"], "must be numbers"),
        (["--vary", "trainer.lr=fast"], "trainer.lr"),
        (["--vary", "policy.vocab_size=512,512.0"], "policy.vocab_size"),
        ([str(QUICKSTART)], "each once"),
        (["--target", "0"], "must be a share of success above 0"),
        (["--target", "1.5"], "must be a share of success above 0"),
        (["--deviation", "0"], "must be points of success above 0"),
        (["--deviation-from", "nowhere"], "is not a report of an ablation"),
        (["--usd-per-hour", "-1"], "must be a price of 0 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_leaves_no_directory(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", str(QUICKSTART), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_channel_that_no_arm_needs_may_be_off() -> None:
    plan = plan_ablation(QUICKSTART, ["replay.beta=0"], ("neither", "sdpo"), (0,))
    assert [run.config.replay.on for run in plan.runs] == [False, False]


def test_every_run_is_trained_once_into_its_own_directory(plan: Ablation, tmp_path: Path) -> None:
    runs = FakeRuns()
    assert ablate_command(Study((plan,)), tmp_path, runs) == 0
    assert runs.trained == [
        tmp_path / arm / f"seed-{seed}"
        for seed in (0, 1)
        for arm in ("neither", "sdpo", "replay", "both")
    ]


@pytest.mark.parametrize("status", [130, 143])
def test_an_interrupted_ablation_goes_on_where_it_was(
    status: int, plan: Ablation, tmp_path: Path
) -> None:
    first, second = FakeRuns(ends={3: status}), FakeRuns()
    assert ablate_command(Study((plan,)), tmp_path, first) == status
    assert len(first.trained) == 3
    assert len(read(tmp_path)["arms"]["sdpo"]["curve"]) == 4  # what is finished is published
    assert read(tmp_path)["runs"][2]["state"] == "stopped"
    assert ablate_command(Study((plan,)), tmp_path, second) == 0
    assert second.trained == [tmp_path / run.place for run in plan.runs[2:]]
    assert second.resumed == [tmp_path / plan.runs[2].place]
    assert ablate_command(Study((plan,)), tmp_path, FakeRuns()) == 0


def test_a_failed_run_is_named_left_out_and_no_reason_to_stop(
    plan: Ablation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRuns(ends={2: 1})
    assert ablate_command(Study((plan,)), tmp_path, runs) == 1
    assert len(runs.trained) == 8
    out = capsys.readouterr().out
    assert "not in the table: sdpo, seed 0 failed: trainer died" in out
    report = read(tmp_path)
    assert list(report["arms"]["sdpo"]["mean_over_run"]["per_seed"]) == ["1"]
    assert report["arms"]["sdpo"]["minus_neither"]["interval_95"] is None
    assert [run["state"] for run in report["runs"]].count("failed") == 1


def test_more_seeds_keep_the_earlier_ones(plan: Ablation, tmp_path: Path) -> None:
    assert ablate_command(Study((plan,)), tmp_path, FakeRuns()) == 0
    runs = FakeRuns()
    more = plan_ablation(QUICKSTART, ["run.steps=6"], seeds=(0, 1, 2), eval_every=2)
    refuse_other_runs(more.runs, tmp_path)
    assert ablate_command(Study((more,)), tmp_path, runs) == 0
    assert {place.name for place in runs.trained} == {"seed-2"}


def test_runs_of_another_config_are_never_mixed_in(plan: Ablation, tmp_path: Path) -> None:
    ablate_command(Study((plan,)), tmp_path, FakeRuns())
    refuse_other_runs(plan.runs, tmp_path)
    other = plan_ablation(QUICKSTART, ["run.steps=6", "trainer.lr=1e-4"], seeds=(0,), eval_every=2)
    with pytest.raises(RunDirectoryError, match=r"another config .*\(trainer\): request the same"):
        refuse_other_runs(other.runs, tmp_path)


def read(output: Path) -> Any:
    return json.loads((output / "ablation.json").read_text())


@pytest.fixture(scope="module")
def finished(plan: Ablation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an ablation has ended; tests only read it."""
    output = tmp_path_factory.mktemp("ablation")
    ablate_command(Study((plan,)), output, FakeRuns())
    return output


@pytest.fixture
def report(finished: Path) -> Any:
    return read(finished)


def test_the_report_holds_every_evaluation_and_what_follows_from_them(report: Any) -> None:
    assert {len(run["evaluations"]) for run in report["runs"]} == {4}
    both, neither = report["arms"]["both"], report["arms"]["neither"]
    assert neither["steps_to_target"] == {"per_seed": {"0": 6, "1": 6}, "median": 6}
    assert both["steps_to_target"] == {"per_seed": {"0": 2, "1": 2}, "median": 2}
    assert neither["minus_neither"] is None
    gain = [
        both["mean_over_run"]["per_seed"][s] - neither["mean_over_run"]["per_seed"][s] for s in "01"
    ]
    assert both["minus_neither"]["mean"] == pytest.approx(sum(gain) / 2)
    assert [point["step"] for point in both["curve"]] == [0, 2, 4, 6]


def test_the_report_is_the_same_from_the_files_alone(
    plan: Ablation, report: Any, finished: Path
) -> None:
    assert ablation_report(plan, finished) | {"power": "", "usd_per_hour": None} == report


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_has_a_row_for_each_step_and_fits(report: Any, width: int) -> None:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(report_table(report))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= width
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert [first for first in firsts if first.isdecimal()] == ["0", "2", "4", "6"]
    text = " ".join(shown.get().split())
    assert "steps to 80% 6 4 4 2" in text
    assert "22.5%" in text


def test_the_notes_say_how_the_interval_was_made(report: Any) -> None:
    text = " ".join(notes(report))
    assert "Student's t over seeds" in text
    assert "seeds 0, 1; 200 held-out episodes every 2 steps" in text


def test_the_picture_is_a_png_whatever_has_finished(plan: Ablation, tmp_path: Path) -> None:
    for number, ends in enumerate(({}, {1: 1}, {1: 130})):
        output = tmp_path / str(number)
        output.mkdir()
        ablate_command(Study((plan,)), output, FakeRuns(ends=ends))
        head = (output / "ablation.png").read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", head[16:24]) == (1350, 1125)


def test_the_newest_run_may_be_one_of_an_ablation(tmp_path: Path) -> None:
    place = tmp_path / "quickstart-ablation" / "both" / "seed-0"
    place.mkdir(parents=True)
    status = RunStatus(os.getpid(), None, "finished", 0, 6, 0, "tcp")
    write_status(place, status)
    assert newest_run(tmp_path) == place


def test_a_config_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        plan_ablation(Path("nowhere.toml"))


def test_a_refused_ablation_loads_neither_torch_nor_monarch() -> None:
    code = (
        "import sys; from composer_mesh.services.cli import main; "
        f"status = main(['ablate', {str(QUICKSTART)!r}, '--set', 'sdpo.alpha=-1']); "
        "sys.exit(status != 2 or bool({'torch', 'monarch', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["", "n" * 300, "a/" * 2000])
def test_a_place_that_no_ablation_can_have_is_refused(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", str(QUICKSTART), "--output", place])
    assert "place" in capsys.readouterr().err
