"""Whole runs with other losses than the preset's: the user's own, and one of each built-in kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from live_run import SHORT, launched
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(600)

STEPS = 2
ROLLOUTS = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]
USERS_MODULE = """
import time

import torch
from prime_rl.orchestrator.advantage import AdvantageInputs, AdvantageOutputs
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from composer_mesh import TorchBackend, loss_needs


class Backend(TorchBackend):
    def model(self, folder):
        model = super().model(folder).requires_grad_(False)
        model.base_model.norm.requires_grad_(True)
        return model

    def optimizers(self, weights):
        return [torch.optim.SGD(list(weights.values()), lr=0.5)]


@loss_needs("entropies")
def loss(inputs: LossInputs, scale: float) -> LossOutputs:
    mask = inputs.loss_mask
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    terms = -(mask * inputs.advantages * ratio)
    metrics = {"tokens": mask.sum(), "advantage": inputs.advantages.mean(), "scale": scale}
    metrics["entropy"] = inputs.entropies
    return LossOutputs(loss=scale * terms.sum(), metrics=metrics)


def slow(inputs: LossInputs) -> LossOutputs:
    time.sleep(8)
    mask = inputs.loss_mask
    return LossOutputs(loss=-(mask * inputs.trainer_logprobs).sum(), metrics={})


def broken(inputs: LossInputs) -> LossOutputs:
    # The loss is finite, and its gradient is not.
    zeros = 0 * (inputs.loss_mask * inputs.trainer_logprobs).sum()
    return LossOutputs(loss=zeros.sqrt(), metrics={})


def endless(inputs: LossInputs) -> LossOutputs:
    while True:
        pass


def advantage(inputs: AdvantageInputs, value: float) -> AdvantageOutputs:
    rewards = torch.tensor([[rollout["reward"] for rollout in group] for group in inputs.rollouts])
    return AdvantageOutputs(advantages=torch.full_like(rewards, value))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's module in it, and nowhere else."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "users_of_a_run.py").write_text(USERS_MODULE)
    return tmp_path / "work"


PLANTED = ("inspect.py", "random.py", "torch.py")
ALONE = {"sdpo.alpha": 0, "replay.beta": 0, "eval.episodes": 2}


def custom(section: str, name: str, kwargs: str = "{}") -> dict[str, Any]:
    return {
        f"{section}.type": "custom",
        f"{section}.import_path": f"users_of_a_run.{name}",
        "run.import_paths": '["."]',
        f"{section}.kwargs": kwargs,
    }


def readable_by_others(folder: Path) -> list[Path]:
    files = list(folder.rglob("*"))
    assert len(files) > 10
    return [path for path in files if path.stat().st_mode & 0o077]


def changed(run: Path, policy_cache: Path) -> set[str]:
    """The weights of a run's last checkpoint that are not those it began with."""
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    tokenizer = (checkpoint / "tokenizer.json").read_bytes()
    cached = policy_cache.glob("*/tokenizer.json")  # beside policies it has teachers' answers
    first = next(one.parent for one in cached if one.read_bytes() == tokenizer)
    before, after = (load_file(one / "model.safetensors") for one in (first, checkpoint))
    return {name for name, weight in after.items() if not weight.equal(before[name])}


def test_functions_of_a_named_folder_train_a_run_and_their_metrics_are_logged(
    folder: Path, policy_cache: Path, temporary: Path
) -> None:
    """With a backend of theirs, which trains one weight.

    And no process imports what lies in its working directory, or leaves files behind.
    """
    for name in PLANTED:
        (folder / name).write_text("open(__file__ + '.ran', 'a').close()\n")
    settings = {
        "run.steps": STEPS,
        **ALONE,
        **custom("loss", "loss", "{scale = 0.25}"),
        "loss.needs": '["entropies"]',
        "trainer.backend.import_path": "users_of_a_run:Backend",
        **custom("advantage", "advantage", "{value = 0.5}"),
    }
    with launched(folder.parent / "run", policy_cache, settings, folder) as run:
        assert run.wait() == 0, run.stderr
    assert run.stderr == ""
    assert {path.name for path in folder.glob("*.ran")} == set()
    assert readable_by_others(run.root) == []
    logs = {path.name for path in (run.root / "logs").iterdir()}
    assert logs >= {"monarch-controller.log", "monarch-trainer.log", "monarch-generator-0.log"}
    assert list(temporary.iterdir()) == []
    steps = run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["policy/custom/scale"] == 0.25
        assert step["policy/custom/advantage"] == pytest.approx(0.5)
        assert step["policy/custom/tokens"] == pytest.approx(step["tokens/trained"] / ROLLOUTS)
        # The ratio is about 1: the loss is minus scale times advantage, for each token.
        assert step["loss/policy"] == pytest.approx(-0.125, rel=0.2)
        assert "policy/clipped_fraction" not in step
        assert step["policy/custom/entropy"] > 0
    assert changed(run.root, policy_cache) == {"model.norm.weight"}


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
    assert len(run.events("trainer_restarted")) <= 1  # an error that comes again is no accident
    assert run.living() == []
    assert run.objects("metrics.jsonl") == []


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
