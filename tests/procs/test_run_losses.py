"""Whole runs with other losses than the preset's: the user's own, and one of each built-in kind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from live_run import launched
from own_functions import OWN_FUNCTIONS, custom

STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's module in it, and nowhere else."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "users_of_a_run.py").write_text(OWN_FUNCTIONS)
    return tmp_path / "work"


ALONE = {"sdpo.alpha": 0, "replay.beta": 0, "eval.episodes": 2}


def test_a_loss_without_end_ends_the_run_with_its_name_and_the_limit(
    folder: Path, policy_cache: Path
) -> None:
    settings = {**ALONE, **custom("loss", "endless"), "supervision.custom_function_s": 2}
    with launched(folder.parent / "run", policy_cache, settings, folder) as run:
        assert run.wait() == 1
    (failed,) = run.events("run_failed")
    assert "custom function 'users_of_a_run.endless': " in failed["detail"]
    assert "did not return within 2 s" in failed["detail"]
    assert failed["detail"] in run.stderr
    assert "users_of_a_run.py" in failed["detail"]
    assert not run.events("trainer_restarted")
    assert run.living() == []
    assert run.objects("metrics.jsonl") == []


@pytest.mark.parametrize(
    ("section", "name", "line", "said"),
    [
        ("loss", "misshapen", "(inputs.trainer_logprobs * weights).sum()", "RuntimeError: The siz"),
        ("advantage", "unscaled", 'ZeroDivisionError("of the user")', "it raised ZeroDivisionErr"),
    ],
)
def test_a_function_that_raises_in_a_step_ends_the_run_with_its_line_and_restarts_nothing(
    section: str, name: str, line: str, said: str, folder: Path, policy_cache: Path
) -> None:
    settings = {**ALONE, **custom(section, name)}
    with launched(folder.parent / "run", policy_cache, settings, folder) as run:
        assert run.wait() == 1
    assert run.stderr.count("\n") <= 12, run.stderr
    frame, source, message, log = run.stderr.splitlines()[-4:]
    assert frame.startswith(f"composer-mesh: {folder}/users_of_a_run.py:")
    assert line in source
    assert said in message
    file = run.root / "logs" / "errors.log"
    assert log.endswith("errors.log")
    assert "Traceback" in file.read_text()
    (failed,) = run.events("run_failed")
    assert failed["detail"] == message
    for kind in ("trainer_restarted", "actor_died", "actor_restarted", "actor_given_up"):
        assert not run.events(kind)


def test_a_step_of_three_times_the_deadline_is_trained_without_a_restart(
    folder: Path, policy_cache: Path
) -> None:
    """Its eight calls of the loss take 8 s each, and a deadline of 20 s bounds the time between."""
    settings = {"run.steps": 1, **ALONE, **custom("loss", "slow"), "run.deadline_s": 20}
    with launched(folder.parent / "run", policy_cache, settings, folder) as run:
        assert run.wait() == 0, run.stderr
    assert not run.events("trainer_restarted")
    assert not [one for one in run.events("deadline_doubled") if "train:" in one["detail"]]
    (step,) = run.objects("metrics.jsonl")
    assert step["time/train_s"] > 3 * 20


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_rollouts_and_no_restart(
    folder: Path, policy_cache: Path
) -> None:
    settings = {"run.steps": 1, **ALONE, **custom("loss", "broken")}
    with launched(folder.parent / "run", policy_cache, settings, folder) as run:
        assert run.wait() == 1
    (found,) = run.events("gradient_not_finite")
    assert "the gradient at the model's last states is not finite in microbatch 1 of" in run.stderr
    assert "Traceback" not in run.stderr
    assert set(found["fields"]["rollouts"]) <= {trace.trace_id for trace in run.traces()}
    assert found["fields"]["rollouts"]
    assert not run.events("trainer_restarted")


def test_cispo_taid_and_simpo_train_a_run_together(tmp_path: Path, policy_cache: Path) -> None:
    settings = {
        "run.steps": STEPS,
        "loss.type": "cispo",
        "advantage.type": "rloo",
        "sdpo.objective": "taid",
        "replay.loss": "simpo",
    }
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    assert run.stderr == ""
    steps = run.objects("metrics.jsonl")
    assert [step["sdpo/taid_t"] for step in steps] == [0.4, 0.4]
    for step in steps:
        assert all(math.isfinite(step[f"loss/{name}"]) for name in ("policy", "sdpo", "replay"))
        assert step["loss/sdpo"] > 0
        assert step["loss/replay"] > 0
        assert "policy/kl_reference" not in step
