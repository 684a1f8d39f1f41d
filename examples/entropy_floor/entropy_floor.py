"""Policy losses that read more than log-probs: entropies of sampled tokens, and their logits.

pip install ./examples/entropy_floor
composer-mesh train examples/entropy_floor/entropy_floor.toml
"""

import torch
from torch import Tensor

from composer_mesh import LossInputs, LossOutputs, loss_needs


@loss_needs("entropies")
def entropy_floor(inputs: LossInputs, floor: float = 0.3, weight: float = 0.1) -> LossOutputs:
    """A policy gradient that pulls tokens up whose entropy has fallen below a floor.

        loss = sum of -r A + weight max(0, floor - H)^2,  r = exp(trainer - inference log-probs)

    Unlike a bonus for all entropy, it leaves alone what is uncertain enough. `entropies` has one
    number for each sampled token, so nothing is masked; the log-probs have one for every token.
    """
    assert inputs.entropies is not None
    short = (floor - inputs.entropies).clamp(min=0)
    return LossOutputs(
        loss=_policy_gradient(inputs) + weight * short.square().sum(),
        metrics={"entropy": inputs.entropies, "below_floor": (short > 0).float()},
    )


@loss_needs("logits")
def z_loss(inputs: LossInputs, weight: float = 1e-4) -> LossOutputs:
    """A policy gradient with PaLM's z-loss, which keeps logits from drifting: weight log(Z)^2.

    Needs the logits of all sampled tokens at once: their memory is planned because of `loss.needs`.
    """
    assert inputs.logits is not None
    log_z = inputs.logits.logsumexp(-1)
    return LossOutputs(
        loss=_policy_gradient(inputs) + weight * log_z.square().sum(),
        metrics={"log_z": log_z},
    )


def _policy_gradient(inputs: LossInputs) -> Tensor:
    mask = inputs.loss_mask
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs)[mask].exp()
    return -(torch.clamp(ratio, max=2.0) * inputs.advantages[mask]).sum()
