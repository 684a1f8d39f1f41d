"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens.

Axes: B sequences (any number of leading axes, also none), T tokens.

All are in nats per token and estimate KL(policy || reference) where the policy sampled the tokens
(J. Schulman, http://joschu.net/blog/kl-approx.html).
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_choice
from composer_mesh.losses.logprobs import bounded, selected

KlEstimator = Literal["k1", "k2", "k3", "abs", "low_var_kl"]
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "low_var_kl")


def token_kl(
    logprobs: Float[Tensor, "*B T"],
    reference_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    estimator: KlEstimator = "k3",
    k2_gradient: bool = False,
) -> Float[Tensor, "*B T"]:
    """Estimate of KL(policy || reference) at each masked token, 0 elsewhere.

        d           logprobs - reference_logprobs
        k1          d
        k2          d^2 / 2
        k3          exp(-d) - 1 + d
        abs         |d|
        low_var_kl  k3 with d clamped to +-20 and the result within 10, as verl does

    k1 and k3 are unbiased in value, k2 in gradient: the expected gradient of k1 is 0, that of k3
    is the other direction's, KL(reference || policy). `k2_gradient` keeps the value and takes the
    gradient of k2, verl's estimators with a "+". The reference gets no gradient; differences beyond
    +-80 (float64: 700) count as that.

    Source: verl `core_algos.py::kl_penalty` (kl, mse, low_var_kl are its names for k1, k2 and k3,
    the last always with the bounds of low_var_kl); TRL's GRPO penalty is k3.
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    gap = bounded(selected(logprobs, mask) - selected(reference_logprobs.detach(), mask))
    value = estimate_kl(gap, estimator)
    if not k2_gradient:
        return value
    half_square = estimate_kl(gap, "k2")
    return half_square - half_square.detach() + value.detach()


def estimate_kl(gap: Float[Tensor, "*B T"], estimator: KlEstimator) -> Float[Tensor, "*B T"]:
    """Return the estimate from log-ratios of policy over reference."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator == "abs":
        return gap.abs()
    if estimator == "low_var_kl":
        held = gap.clamp(-20, 20)
        return (torch.expm1(-held) + held).clamp(max=10)
    return torch.expm1(-gap) + gap
