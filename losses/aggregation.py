"""Aggregation: reduces the terms of tokens to the loss of a step, with an explicit normalizer.

Axes: B sequences (any number of leading axes, also none), T tokens. One sequence per row: "grpo"
takes a mean over each row.

Callers count tokens and sequences, and split the step into microbatches and ranks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.logprobs import PolicyLoss, masked_mean
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    check_choice,
    masked_sum,
    normalized_sum,
)

Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


@dataclass(frozen=True)
class Reducer:
    """Reduces a loss's values per token, with the caller's settings.

    "sum" aggregates them to one scalar; "none" returns them [*B T] undivided, 0 outside of the
    mask, so that `aggregate` of them is what "sum" returns.
    """

    mask: Bool[Tensor, "*B T"]
    aggregation: Aggregation
    normalizer: Number | None
    reduction: Reduction

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("reduction", self.reduction, get_args(Reduction))
        if self.reduction == "sum" and self.normalizer is None:
            raise ValueError(
                "normalizer is None but reduction 'sum' divides by it: pass the count of the whole"
                " step, `aggregation_normalizer(aggregation, ...)`, or reduction='none'"
            )

    def __call__(self, values: Float[Tensor, "*B T"]) -> Float[Tensor, "..."]:
        """Return the aggregated values, or the values under the mask."""
        if self.reduction == "none" or self.normalizer is None:
            return torch.where(self.mask, values, 0.0)
        return aggregate(values, self.mask, self.aggregation, self.normalizer)


def aggregate(
    values: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    kind: Aggregation,
    normalizer: Number,
) -> Float[Tensor, ""]:
    """Terms of tokens to one scalar, in the units of the terms; an empty mask gives 0.

        grpo        sum over sequences of (the mean over the tokens of each) / normalizer
        all others  sum over all tokens / normalizer

    `aggregation_normalizer` gives each kind's normalizer for a whole step. A sequence without a
    token under the mask adds 0 to any of them. Aggregation types are TRL's `loss_type`
    (`GRPOTrainer._compute_loss`); verl's `agg_loss` modes are the same sums:

        token-mean               dapo, normalizer = tokens of the step
        seq-mean-token-mean      grpo, normalizer = sequences with a token
        seq-mean-token-sum       luspo, normalizer = sequences with a token
        seq-mean-token-sum-norm  dr_grpo, normalizer = sequences * horizon (older: horizon)

    Raises ValueError for an unknown kind or a normalizer that is no count. Differs from verl where
    the mask is empty, which is NaN there, and in "grpo": verl divides the sum of a sequence by its
    n + 1e-8 tokens, here by n.
    """
    check_choice("aggregation", kind, get_args(Aggregation))
    if kind == "grpo":
        return normalized_sum(masked_mean(values, mask), normalizer)
    return masked_sum(values, mask, normalizer)


def aggregation_normalizer(
    kind: Aggregation,
    *,
    sequences: int,
    tokens: int,
    max_completion_length: int | None = None,
) -> int:
    """What one optimizer step divides by, from its counts over all microbatches and ranks.

        grpo        sequences                          DeepSeekMath, arXiv 2402.03300
        bnpo, dapo  tokens                             DAPO, arXiv 2503.14476
        dr_grpo     sequences * max_completion_length  Dr. GRPO, arXiv 2503.20783
        luspo       sequences                          LUSPO, arXiv 2602.05261

    `tokens` counts those under the mask, `sequences` all rows, also those without a token. The
    losses of all microbatches and ranks then sum (not average) to the loss of the step.

    LUSPO is GSPO (ratio_level "sequence") with each sequence weighted by its length.

    TRL means the same for grpo, dr_grpo, luspo and dapo, in other words: its grpo, bnpo, luspo and
    dr_grpo take the microbatch's own counts, divide by gradient_accumulation_steps and average over
    ranks, and its dapo divides by num_items_in_batch / num_processes and averages over ranks. With
    equal numbers of sequences in all microbatches these are the numbers above. TRL's bnpo differs
    where microbatches differ in tokens: it averages their means, so that a token's weight depends
    on its microbatch. To get that, pass tokens of the microbatch * gradient_accumulation_steps (*
    ranks) as normalizer of each.
    """
    check_choice("aggregation", kind, get_args(Aggregation))
    if kind in ("grpo", "luspo"):
        return sequences
    if kind != "dr_grpo":
        return tokens
    if max_completion_length is None or max_completion_length < 1:
        raise ValueError(
            f"max_completion_length is {max_completion_length} but dr_grpo divides by it: pass"
            " the number of tokens that a completion may have, a constant of the run"
        )
    return sequences * max_completion_length


def policy_loss(
    reduce: Reducer,
    terms: Float[Tensor, "*B T"],
    *,
    clipped: Bool[Tensor, "*B T"],
    ratio: Float[Tensor, "*B T"],
    log_ratio: Float[Tensor, "*B T"],
    kl: Float[Tensor, "*B T"] | None = None,
    kl_beta: Number = 0.0,
) -> PolicyLoss:
    """Build a policy loss from its terms and KL penalty, and reduce its metrics alike."""
    log_ratio = log_ratio.detach()
    loss, penalty = reduce(terms), None if kl is None else reduce(kl)
    return PolicyLoss(
        loss=loss if penalty is None else loss + kl_beta * penalty,
        clipped_fraction=reduce(clipped.to(log_ratio.dtype)),
        ratio_mean=reduce(ratio.detach()),
        kl_k3=reduce(torch.expm1(log_ratio) - log_ratio),
        kl_reference=None if penalty is None else penalty.detach(),
    )
