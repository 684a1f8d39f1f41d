"""`policy.start`: a run starts from the finished supervised run of its config, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from supervised_runs import checkpoint, supervised

from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.directory.resume import refuse_unfit
from composer_mesh.services.directory.sft_start import NoStart, started
from composer_mesh.services.evaluation.target import target_of

SFT = {"steps": 4, "demonstrations": 10}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_config(build_config: Any) -> Any:
    def build(start: str = "sft", **sections: Any) -> Config:
        policy = {"start": start, **sections.pop("policy", {})}
        return build_config(policy=policy, sft=SFT, **sections)

    return build


def test_a_run_starts_from_the_last_checkpoint_of_its_own_supervised_run(
    make_config: Any, tmp_path: Path
) -> None:
    config = make_config()
    supervised(config, tmp_path / "runs" / f"{config.run.name}-sft", 2, 4)
    found = started(config).policy
    assert found.path == tmp_path / "runs" / f"{config.run.name}-sft" / "checkpoints" / "step-4"
    assert found.start.startswith(f"sft:{found.path}@")
    other = supervised(make_config(run={"name": "b", "steps": 1}), tmp_path / "elsewhere", 4)
    named = started(make_config(f"sft:{other}")).policy
    assert named.path == other / "checkpoints" / "step-4"
    assert started(make_config("base")) == make_config("base")


def test_without_a_supervised_run_the_command_to_run_is_named(make_config: Any) -> None:
    with pytest.raises(NoStart, match="holds no supervised run: run composer-mesh sft with this"):
        started(make_config())


@pytest.mark.plugins
def test_check_says_what_is_missing_and_checks_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", str(ROOT / "configs" / "quickstart.toml"), "--set", "policy.start=sft"]
    assert main(command) == 0
    assert "runs/quickstart-sft holds no supervised run" in capsys.readouterr().out
    assert main(["train", *command[1:]]) == 2
    assert "run composer-mesh sft with this config first" in capsys.readouterr().err


def test_a_supervised_run_that_was_stopped_is_not_started_from(
    make_config: Any, tmp_path: Path
) -> None:
    config = make_config()
    run = supervised(config, tmp_path / "runs" / f"{config.run.name}-sft")
    for step in (0, 2):
        if step:
            checkpoint(run, step)
        with pytest.raises(NoStart, match=f"a checkpoint of step {step} of 4: finish it by"):
            started(config)


def test_a_damaged_checkpoint_is_not_started_from(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    run = supervised(config, tmp_path / "runs" / f"{config.run.name}-sft", 4)
    (run / "checkpoints" / "step-4" / "model.safetensors").write_text("weighty")
    with pytest.raises(NoStart, match=r"is damaged .*not as it was written"):
        started(config)


@pytest.mark.parametrize(
    "other", [{"layers": 1}, {"path": "a/model"}, {"warm_start": {"steps": 1}}], ids=str
)
def test_a_supervised_run_of_another_model_is_refused(
    make_config: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    run = supervised(make_config(), tmp_path / "fine-tuned", 4)
    with pytest.raises(NoStart, match=rf"policy\.{next(iter(other))}.* but was .* set it back"):
        started(make_config(f"sft:{run}", policy=other))


def test_a_run_that_is_not_supervised_is_refused(make_config: Any, tmp_path: Path) -> None:
    run = supervised(make_config(), tmp_path / "trained", 4)
    (run / "config.toml").write_text(
        dump_toml(make_config("base").model_copy(update={"sft": None}))
    )
    with pytest.raises(
        NoStart, match=r"is not a supervised run: set policy\.path to its checkpoint"
    ):
        started(make_config(f"sft:{run}"))


def test_a_resumed_run_keeps_its_start_or_is_refused(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    run = supervised(config, tmp_path / "runs" / f"{config.run.name}-sft", 4)
    train = tmp_path / "runs" / config.run.name
    train.mkdir()
    (train / STORE_FILE).touch()
    (train / "config.toml").write_text(dump_toml(started(config)))
    assert refuse_unfit(train, started(config)) == []
    recorded = load_config(train / "config.toml")
    assert started(recorded) == recorded
    checkpoint(run, 4, "other weights")
    with pytest.raises(RunDirectoryError, match=r"policy\.start: "):
        refuse_unfit(train, started(config))
    with pytest.raises(NoStart, match="is of another supervised run by now"):
        started(recorded)
    run.rename(tmp_path / "gone")
    with pytest.raises(NoStart, match="is gone: restore it"):
        started(recorded)


def test_a_checkpoint_of_a_started_run_is_evaluated_by_itself(
    make_config: Any, tmp_path: Path
) -> None:
    config = make_config()
    supervised(config, tmp_path / "runs" / f"{config.run.name}-sft", 4)
    text = tmp_path / "own.toml"
    text.write_text(dump_toml(started(config)))
    folder = checkpoint(tmp_path / "runs" / config.run.name, 1)
    found = target_of(str(folder), str(text), []).config
    assert found.policy.path == folder
    assert started(found) == found
