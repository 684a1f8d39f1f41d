"""A user's module with a loss, an advantage and a backend of their own, and settings for them."""

from __future__ import annotations

from typing import Any

OWN_FUNCTIONS = """
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
    time.sleep(0 if is_example(inputs) else 8)
    mask = inputs.loss_mask
    return LossOutputs(loss=-(mask * inputs.trainer_logprobs).sum(), metrics={})


def broken(inputs: LossInputs) -> LossOutputs:
    # The loss is finite, and its gradient is not.
    if is_example(inputs):
        return LossOutputs(loss=inputs.trainer_logprobs.sum())
    zeros = 0 * (inputs.loss_mask * inputs.trainer_logprobs).sum()
    return LossOutputs(loss=zeros.sqrt(), metrics={})


def is_example(inputs: LossInputs) -> bool:
    # Every rollout of a run is longer than what a loss is tried with before the run.
    return len(inputs.loss_mask) < 16


def endless(inputs: LossInputs) -> LossOutputs:
    while not is_example(inputs):
        pass
    return LossOutputs(loss=inputs.trainer_logprobs.sum())


def misshapen(inputs: LossInputs) -> LossOutputs:
    weights = inputs.advantages if is_example(inputs) else inputs.advantages[:-1]
    return LossOutputs(loss=(inputs.trainer_logprobs * weights).sum())


def unscaled(inputs: AdvantageInputs) -> AdvantageOutputs:
    lengths = [[rollout["completion_len"] for rollout in group] for group in inputs.rollouts]
    if max(map(max, lengths)) > 2:  # those of the example are 2
        raise ZeroDivisionError("of the user")
    return AdvantageOutputs(advantages=torch.zeros(len(lengths), len(lengths[0])))


def advantage(inputs: AdvantageInputs, value: float) -> AdvantageOutputs:
    rewards = torch.tensor([[rollout["reward"] for rollout in group] for group in inputs.rollouts])
    return AdvantageOutputs(advantages=torch.full_like(rewards, value))
"""

PLANTED = ("inspect.py", "random.py", "torch.py")


def custom(section: str, name: str, kwargs: str = "{}") -> dict[str, Any]:
    """Settings by which a section takes a function of the module in the working directory."""
    return {
        f"{section}.type": "custom",
        f"{section}.import_path": f"users_of_a_run.{name}",
        "run.import_paths": '["."]',
        f"{section}.kwargs": kwargs,
    }
