"""Gradient of the DPO loss by the log-probs of answers, for engines that only run forwards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from composer_mesh.channels.step import step_loss
from composer_mesh.losses.preference import dpo_loss
from composer_mesh.rollouts.batches import PairSample


def check_references(pairs: Sequence[PairSample]) -> None:
    """Raise ValueError for a pair without the log-probs of a reference."""
    missing = next((pair.pair_id for pair in pairs if pair.reference is None), None)
    if missing is not None:
        raise ValueError(
            f"pair {missing} has no reference log-probs: score pairs with the initial policy first"
        )


def pair_gradients(
    logprobs: Tensor,
    pairs: Sequence[PairSample],
    *,
    weight: float,
    dpo_beta: float,
    normalizer: int,
) -> tuple[float, Tensor]:
    """Return the DPO loss, and the gradient of `weight` times it by each answer's log-prob.

    `logprobs` [2 N] has the chosen and the rejected answer of each of N pairs, summed over ids.
    """
    values = logprobs.detach().float().requires_grad_()
    references = torch.tensor(
        [pair.reference for pair in pairs], dtype=torch.float32, device=values.device
    )
    result = dpo_loss(
        values[0::2],
        values[1::2],
        references[:, 0],
        references[:, 1],
        beta=dpo_beta,
        normalizer=normalizer,
    )
    found = step_loss({"replay": lambda: result.loss}, {"replay": weight})
    (gradient,) = torch.autograd.grad(found.total(), values)
    return float(found.losses["replay"]), gradient
