"""Preference losses: raise the chosen answer over the rejected one.

Axes: B pairs or sequences (any number of leading axes, also none), T tokens.

Log-probs of answers are sums over their tokens, in nats; the losses that speak about averages
take the token counts beside them. Nothing here decides which answer is better or runs the
reference model, and SimPO has no argument that could hold one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_mesh.losses.reductions import Number, at_least_float32, normalized_sum

PreferenceLink = Literal["sigmoid", "hinge", "robust"]


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss and what it saw; every figure is a sum over the loss' normalizer.

    `margin` is the implicit reward of the chosen answer less that of the rejected one, `accuracy`
    the share of pairs with a positive margin. Both are detached.
    """

    loss: Float[Tensor, ""]
    margin: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def sequence_logprobs(
    token_logprobs: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B"]:
    """Log-probability of each answer: the sum over its tokens, 0 for an answer without any.

    With `mask.sum(-1)` as its length, it is what every loss below asks for.
    """
    return torch.where(mask, at_least_float32(token_logprobs), 0.0).sum(-1)


def dpo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    *,
    beta: Number = 0.1,
    normalizer: Number,
    label_smoothing: Number = 0.0,
    loss_type: PreferenceLink = "sigmoid",
) -> PreferenceLoss:
    """Direct preference optimization (arXiv 2305.18290), from summed answer log-probs.

        z       = beta ((chosen - reference_chosen) - (rejected - reference_rejected))
        sigmoid   -(1 - e) log sigmoid(z) - e log sigmoid(-z)                cDPO where e > 0
        robust   (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)   arXiv 2403.00409
        hinge     max(0, 1 - z)                                              SLiC, arXiv 2305.10425
        loss    = sum over pairs / normalizer

    `normalizer` is the number of pairs in the whole step; e is `label_smoothing`, the chance that
    a pair is the wrong way round. The margin is z. The reference gets no gradient. No pairs give 0.

    Agrees with TRL's former `DPOTrainer.dpo_loss` (2025). TRL since 2026 ignores label_smoothing
    for `sigmoid`; every TRL ignores it for `hinge`, where it is an error here.
    """
    _check("dpo", beta, label_smoothing, loss_type)
    reference = at_least_float32(reference_chosen) - at_least_float32(reference_rejected)
    policy = at_least_float32(chosen) - at_least_float32(rejected)
    z = beta * (policy - reference.detach())
    return _preference(_link(z, label_smoothing, loss_type), z, normalizer)


def ipo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    chosen_lengths: Int[Tensor, "*B"] | None = None,
    rejected_lengths: Int[Tensor, "*B"] | None = None,
    *,
    beta: Number = 0.1,
    normalizer: Number,
) -> PreferenceLoss:
    """Identity preference optimization (arXiv 2310.12036, equation 17), from summed log-probs.

        c, r = (chosen - reference_chosen) / |chosen|, (rejected - reference_rejected) / |rejected|
        loss = sum over pairs of (c - r - 1 / (2 beta))^2, over normalizer

    `beta` is the paper's tau: the loss pulls the gap to 1 / (2 beta), so 0.1 asks for 5 nats, with
    lengths for 5 nats a token. Lengths count the answer's tokens; one of 0 counts as 1, so that an
    empty answer is finite. With them this is TRL's HEAD (`DPOTrainer._compute_loss`, "ipo");
    without them the equation as printed, on sums, and TRL's former `dpo_loss`, which took sums or
    averages as its caller liked. TRL counts the unshifted mask, which has one token more than are
    scored only where an answer begins at position 0.

    The margin is beta ((chosen - reference_chosen) - (rejected - reference_rejected)), TRL's reward
    margin, never length-normalized. The reference gets no gradient. No pairs give 0.
    """
    _check("ipo", beta)
    if (chosen_lengths is None) != (rejected_lengths is None):
        raise ValueError(
            "ipo has the lengths of one side only, but compares averages with averages or sums with"
            " sums: pass chosen_lengths and rejected_lengths, or neither"
        )
    for_chosen = at_least_float32(chosen) - at_least_float32(reference_chosen.detach())
    for_rejected = at_least_float32(rejected) - at_least_float32(reference_rejected.detach())
    gap = _average(for_chosen, chosen_lengths) - _average(for_rejected, rejected_lengths)
    return _preference((gap - 1 / (2 * beta)) ** 2, beta * (for_chosen - for_rejected), normalizer)


def simpo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    chosen_lengths: Int[Tensor, "*B"],
    rejected_lengths: Int[Tensor, "*B"],
    *,
    beta: Number = 2.0,
    gamma: Number = 0.5,
    label_smoothing: Number = 0.0,
    loss_type: PreferenceLink = "sigmoid",
    normalizer: Number,
) -> PreferenceLoss:
    """Simple preference optimization (arXiv 2405.14734), without a reference model.

        m    = beta (chosen / |chosen| - rejected / |rejected|)
        z    = m - gamma
        loss = sum over pairs of -(1 - e) log sigmoid(z) - e log sigmoid(-z), over normalizer

    `chosen` and `rejected` are summed log-probs, lengths their token counts; a length of 0 counts
    as 1, so that an empty answer is finite (upstream: NaN). `gamma` is the target margin in units
    of m. Upstream's option is gamma_beta_ratio = gamma / beta = 0.25, hence 0.5 here; it stays 0.5
    when beta changes, so scale both. The authors' runs: beta 2.0 to 10, gamma / beta 0.1 to 0.8;
    TRL's CPOTrainer defaults to beta 0.1 and gamma 0.5. The margin is m. No pairs give 0.

    Agrees with princeton-nlp/SimPO `SimPOTrainer.simpo_loss` on averaged log-probs, whose `hinge`
    is max(0, 1 - z); `robust` is ours, by analogy with DPO.
    """
    _check("simpo", beta, label_smoothing, loss_type)
    if not 0 <= gamma < float("inf"):
        raise ValueError(f"simpo gamma is {gamma} but has to be finite and >= 0: use beta / 4")
    for_chosen = _average(at_least_float32(chosen), chosen_lengths)
    for_rejected = _average(at_least_float32(rejected), rejected_lengths)
    margin = beta * (for_chosen - for_rejected)
    return _preference(_link(margin - gamma, label_smoothing, loss_type), margin, normalizer)


def _link(z: Float[Tensor, "*B"], e: Number, loss_type: PreferenceLink) -> Float[Tensor, "*B"]:
    """Loss of each pair from its scaled gap."""
    if loss_type == "hinge":
        return torch.relu(1 - z)
    right, wrong = -(1 - e) * logsigmoid(z), -e * logsigmoid(-z)
    return (right - wrong) / (1 - 2 * e) if loss_type == "robust" else right + wrong


def _average(logprobs: Float[Tensor, "*B"], lengths: Tensor | None) -> Float[Tensor, "*B"]:
    return logprobs if lengths is None else logprobs / lengths.clamp(min=1)


def _preference(
    per_pair: Float[Tensor, "*B"], margin: Float[Tensor, "*B"], normalizer: Number
) -> PreferenceLoss:
    margin = margin.detach()
    return PreferenceLoss(
        loss=normalized_sum(per_pair, normalizer),
        margin=normalized_sum(margin, normalizer),
        accuracy=normalized_sum((margin > 0).to(margin.dtype), normalizer),
    )


def _check(
    name: str, beta: Number, label_smoothing: Number = 0.0, loss_type: str = "sigmoid"
) -> None:
    if not beta > 0:
        default = 2.0 if name == "simpo" else 0.1
        raise ValueError(f"{name} beta is {beta} but has to be > 0: use {default}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but has to be in [0, 0.5):"
            " from 0.5 on, pairs teach the opposite; swap chosen and rejected instead"
        )
    if loss_type not in ("sigmoid", "hinge", "robust"):
        raise ValueError(f"loss_type is {loss_type!r}: use 'sigmoid', 'hinge' or 'robust'")
    if loss_type == "hinge" and label_smoothing > 0:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but hinge has none: use 0, or 'sigmoid'"
        )
