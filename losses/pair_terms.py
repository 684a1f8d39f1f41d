"""Unreduced terms of preference losses, one per pair, by type of loss.

Axes: B pairs (any number of leading axes, also none).

A score measures how far the policy has moved an answer from the reference: the log-ratio, or
another f-divergence's function of it. Callers handle lengths, tokens and normalizers.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_mesh.losses.checks import check_choice
from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT
from composer_mesh.losses.reductions import Number

PreferenceType = Literal[
    "sigmoid", "hinge", "robust", "exo_pair", "apo_zero", "apo_down", "bco_pair", "sigmoid_norm"
]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")

Scores = Float[Tensor, "*B"]


def divergence_scores(
    log_ratios: Float[Tensor, "*B"], kind: FDivergence, f_alpha: Number
) -> Float[Tensor, "*B"]:
    """f'(u) at u = exp(log-ratio), without its constant: the scores of f-DPO (arXiv 2309.16240).

        reverse_kl        log u, which is DPO       js_divergence     log sigmoid(log u)
        forward_kl        -1 / u                    alpha_divergence  u^(a - 1) / (a - 1)

    a is `f_alpha`, 1 less the paper's alpha, as in TRL: 1 is reverse KL and 0 forward KL. Exponents
    above 80 count as 80, so that they are finite in float32.
    """
    check_choice("f_divergence_type", kind, F_DIVERGENCES)
    if kind == "js_divergence":
        return logsigmoid(log_ratios)
    slope = -1.0 if kind == "forward_kl" else f_alpha - 1.0
    if kind == "reverse_kl" or abs(slope) < 1e-6:
        return log_ratios
    return (slope * log_ratios).clamp(max=LOG_RATIO_LIMIT).exp() / slope


def pair_terms(
    kind: PreferenceType, chosen: Scores, rejected: Scores, beta: Number, e: Number
) -> Float[Tensor, "*B"]:
    """Loss of each pair from the scores of its answers; e is the label smoothing."""
    check_choice("loss_type", kind, tuple(_TERMS))
    _check_smoothing(kind, e)
    return _TERMS[kind](beta * chosen, beta * rejected, e)


def check_divergence(kind: str, f_divergence_type: FDivergence) -> None:
    """Raise for types whose formula needs log-ratios if the scores are of another divergence."""
    if f_divergence_type != "reverse_kl" and kind in ("apo_zero", "apo_down"):
        raise ValueError(
            f"f_divergence_type is {f_divergence_type!r} but loss_type {kind!r} is defined on"
            " log-ratios: use 'reverse_kl', or 'sigmoid'"
        )


def _smoothed(z: Scores, e: Number) -> Scores:
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def _robust(z: Scores, e: Number) -> Scores:
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def _exo_pair(c: Scores, r: Scores, e: Number) -> Scores:
    z, smoothed = c - r, torch.tensor(e, dtype=c.dtype, device=c.device)
    right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-smoothed))
    return right + torch.sigmoid(-z) * (logsigmoid(-z) - smoothed.log())


_TERMS: Mapping[str, Callable[[Scores, Scores, Number], Tensor]] = {
    "sigmoid": lambda c, r, e: _smoothed(c - r, e),
    "sigmoid_norm": lambda c, r, e: _smoothed(c - r, e),
    "hinge": lambda c, r, _: torch.relu(1 - (c - r)),
    "robust": lambda c, r, e: _robust(c - r, e),
    "exo_pair": _exo_pair,
    "apo_zero": lambda c, r, _: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda c, r, _: torch.sigmoid(c) + torch.sigmoid(r - c),
    "bco_pair": lambda c, r, _: -logsigmoid(c) - logsigmoid(-r),
}
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")
"""Types that use the label smoothing."""


def _check_smoothing(kind: PreferenceType, e: Number) -> None:
    if e > 0 and kind not in SMOOTHED:
        raise ValueError(f"label_smoothing is {e} but {kind} has none: use 0, or 'sigmoid'")
    if e == 0 and kind == "exo_pair":
        raise ValueError(
            "label_smoothing is 0 but exo_pair takes its logarithm: use 1e-3 as its paper"
        )
