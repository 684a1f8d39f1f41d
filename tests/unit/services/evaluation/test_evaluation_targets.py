"""What `eval` takes: a config, a run of this account, a model folder or a URL, or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.configs.schema import Config
from composer_mesh.services.cli import main
from composer_mesh.services.evaluation.target import EvalRefused, target_of
from composer_mesh.services.store.writing import RunStore

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.fixture
def run(tmp_path: Path, build_config: object) -> Path:
    """The directory of a run with a checkpoint of its second step."""
    config: Config = build_config()  # type: ignore[operator]
    root = tmp_path / "run"
    with RunStore(root, config):
        pass
    for step in (1, 2):
        draft = CheckpointDraft(root, step)
        (draft.folder / "config.json").write_text("{}")
        draft.commit([])
    return root


def test_a_config_is_evaluated_without_teachers_and_hints() -> None:
    target = target_of(QUICKSTART, None, ["eval.episodes=7"])
    assert not target.config.sdpo.on
    assert not target.config.replay.on
    assert (target.config.eval.episodes, target.config.policy.path) == (7, None)


def test_a_run_is_evaluated_at_its_newest_checkpoint(run: Path) -> None:
    target = target_of(str(run), None, [])
    assert target.config.policy.path == run / "checkpoints" / "step-2"
    assert target.config.run.name == "unit"


def test_a_checkpoint_has_the_task_of_its_run_or_of_the_command(run: Path, tmp_path: Path) -> None:
    first = run / "checkpoints" / "step-1"
    assert target_of(str(first), None, []).config.run.name == "unit"
    elsewhere = tmp_path / "elsewhere"
    first.rename(elsewhere)
    with pytest.raises(EvalRefused, match="outside of a run, which has no task: add --task"):
        target_of(str(elsewhere), None, [])
    target = target_of(str(elsewhere), "toolbox", [])
    assert (target.config.policy.path, target.config.data.task) == (elsewhere, "toolbox")


def test_code_that_a_strangers_run_names_is_not_imported(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text() + "\n")  # its signature does not fit any more
    for named in (run, run / "checkpoints" / "step-1"):
        with pytest.raises(EvalRefused, match="was not written by a run of this account"):
            target_of(str(named), None, [])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://h/v1", "--model", "m"], "is a URL, which has no task: add --task"),
        (["http://h/v1", "--task", "toolbox"], "add --model NAME"),
        (["nowhere"], "is neither a config"),
        ([QUICKSTART, "--samples", "0"], "--samples is 0"),
        ([QUICKSTART, "--samples", "2"], "add --set eval.temperature=1.0"),
        ([QUICKSTART, "--model", "m"], "--model is for URLs"),
        ([QUICKSTART, "--task", "toolbox"], "is a config, which has its own"),
        ([QUICKSTART, "--resume"], "leave --resume out to begin"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert why in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir() if one.name != "runs"] == []
