"""Preference losses: raise the chosen answer over the rejected one.

Axes: B pairs (any number of leading axes, also none).

Log-probs of answers are sums over their tokens, in nats (`sequence_logprobs`); losses on averages
also take the token counts. With `reduction="none"` the loss and its metrics are per pair [B] and
not divided. The caller chooses the better answer and runs the reference model; SimPO takes no
reference. A score measures how far the policy has moved an answer from the reference: the
log-ratio, or another f-divergence's function of it. Log-probabilities of answers come from those of
their tokens (T tokens, V vocabulary).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_choice,
    check_fraction,
    check_positive,
    reduce_terms,
)

PreferenceType = Literal[
    "sigmoid", "hinge", "robust", "exo_pair", "apo_zero", "apo_down", "bco_pair", "sigmoid_norm"
]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

Scores = Float[Tensor, "*B"]
PreferenceLink = Literal["sigmoid", "hinge", "robust"]
MixedType = PreferenceType | Literal["ipo", "sft"]
MPO_TYPES: Mapping[MixedType, float] = MappingProxyType(
    {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
)
"""The mix of the MPO paper (arXiv 2411.10442)."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss and its metrics, which are sums over the loss's normalizer.

    The rewards are the implicit ones of either answer, beta times its log-ratio (SimPO: its average
    log-prob); `margin` is their difference and `accuracy` the fraction of pairs in which it is
    positive. All but `loss` are detached. With `reduction="none"` each is per pair.
    """

    loss: Float[Tensor, "*B"]
    margin: Float[Tensor, "*B"]
    accuracy: Float[Tensor, "*B"]
    chosen_reward: Float[Tensor, "*B"]
    rejected_reward: Float[Tensor, "*B"]


def dpo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    chosen_lengths: Int[Tensor, "*B"] | None = None,
    rejected_lengths: Int[Tensor, "*B"] | None = None,
    *,
    beta: Number = 0.1,
    normalizer: Number | None = None,
    label_smoothing: Number = 0.0,
    loss_type: PreferenceType = "sigmoid",
    f_divergence_type: FDivergence = "reverse_kl",
    f_alpha: Number = 0.5,
    weights: Float[Tensor, "*B"] | None = None,
    reduction: Reduction = "sum",
) -> PreferenceLoss:
    """Direct preference optimization (arXiv 2305.18290), from summed answer log-probs.

        c, r    = beta (chosen - reference_chosen), beta (rejected - reference_rejected)
        z       = c - r
        sigmoid   -(1 - e) log sigmoid(z) - e log sigmoid(-z)                cDPO where e > 0
        robust   (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)   arXiv 2403.00409
        hinge     max(0, 1 - z)                                              SLiC, arXiv 2305.10425
        exo_pair  KL((sigmoid(z), sigmoid(-z)) || (1 - e, e)), e > 0         arXiv 2402.00856, 16
        apo_zero  1 - sigmoid(c) + sigmoid(r)                                arXiv 2408.06266, 7
        apo_down  sigmoid(c) + 1 - sigmoid(z)                                arXiv 2408.06266, 8
        bco_pair  -log sigmoid(c) - log sigmoid(-r), without a reward shift  arXiv 2404.04656
        loss    = sum over pairs of weights * term, over normalizer

    `normalizer` is the number of pairs in the whole step; e is `label_smoothing`, the chance that
    a pair is the wrong way round. With lengths, c and r are per token; TRL's `sigmoid_norm` is
    `sigmoid` so, and demands them. `f_divergence_type` and `f_alpha` replace the log-ratios by
    `_divergence_scores`. `weights` are constants per pair, such as products of `wpo_weights`.

    Rewards and margin are c, r and z from plain log-ratios, also where lengths or another
    divergence change the loss. The reference gets no gradient. No pairs give 0.

    Agrees with TRL's `DPOTrainer._compute_loss` (2026), which however ignores label_smoothing for
    `sigmoid` and `sigmoid_norm` (its former `dpo_loss` did not) and for types that have none, where
    it is an error here; and which lets apo_down mix log-ratios with scores of another divergence.
    """
    _check("dpo", beta, label_smoothing)
    _check_divergence(loss_type, f_divergence_type)
    if loss_type == "sigmoid_norm":
        _need_lengths(loss_type, chosen_lengths, rejected_lengths)
    _check_lengths("dpo", chosen_lengths, rejected_lengths)
    ratios = (_log_ratio(chosen, reference_chosen), _log_ratio(rejected, reference_rejected))
    c, r = (_divergence_scores(ratio, f_divergence_type, f_alpha) for ratio in ratios)
    scores = (_average(c, chosen_lengths), _average(r, rejected_lengths))
    terms = _pair_terms(loss_type, *scores, beta, label_smoothing)
    return _preference(terms, ratios, beta, weights, normalizer, reduction)


def mpo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    chosen_lengths: Int[Tensor, "*B"] | None = None,
    rejected_lengths: Int[Tensor, "*B"] | None = None,
    *,
    loss_types: Mapping[MixedType, Number] = MPO_TYPES,
    beta: Number = 0.1,
    normalizer: Number | None = None,
    label_smoothing: Number = 0.0,
    f_divergence_type: FDivergence = "reverse_kl",
    f_alpha: Number = 0.5,
    weights: Float[Tensor, "*B"] | None = None,
    reduction: Reduction = "sum",
) -> PreferenceLoss:
    """Mixed preference optimization (arXiv 2411.10442): several losses of a pair, weighted.

        loss = sum over pairs and types of loss_types[type] * term, over normalizer

    Types are those of `dpo_loss` on sums, `sigmoid_norm` and `ipo` on averages, and `sft`, the
    chosen answer's negative log-prob per token; the last three demand lengths. The default is the
    paper's mix. Metrics are those of `dpo_loss`.

    Agrees with TRL's `DPOTrainer._compute_loss` for `loss_type` and `loss_weights`, with one
    exception: its `sft` is a mean over the tokens of the microbatch, here it is the paper's, a mean
    over each answer. The paper moves the rewards of `bco_pair` by a running mean; TRL and this do
    not.
    """
    _check("dpo", beta, label_smoothing)
    _check_lengths("mpo", chosen_lengths, rejected_lengths)
    _check_mix(loss_types, label_smoothing)
    ratios = (_log_ratio(chosen, reference_chosen), _log_ratio(rejected, reference_rejected))
    c, r = (_divergence_scores(ratio, f_divergence_type, f_alpha) for ratio in ratios)

    def term(kind: MixedType) -> Tensor:
        averages = (_average(c, chosen_lengths), _average(r, rejected_lengths))
        if kind in ("sigmoid_norm", "ipo", "sft"):
            _need_lengths(kind, chosen_lengths, rejected_lengths)
        if kind == "sft":
            return -_average(at_least_float32(chosen), chosen_lengths)
        if kind == "ipo":
            return _ipo_terms(*averages, beta)
        _check_divergence(kind, f_divergence_type)
        e = label_smoothing if kind in SMOOTHED else 0
        return _pair_terms(kind, *(averages if kind == "sigmoid_norm" else (c, r)), beta, e)

    mixed = [weight * term(kind) for kind, weight in loss_types.items()]
    return _preference(sum(mixed[1:], mixed[0]), ratios, beta, weights, normalizer, reduction)


def ipo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    chosen_lengths: Int[Tensor, "*B"] | None = None,
    rejected_lengths: Int[Tensor, "*B"] | None = None,
    *,
    beta: Number = 0.1,
    normalizer: Number | None = None,
    weights: Float[Tensor, "*B"] | None = None,
    reduction: Reduction = "sum",
) -> PreferenceLoss:
    """Identity preference optimization (arXiv 2310.12036, equation 17), from summed log-probs.

        c, r = (chosen - reference_chosen) / |chosen|, (rejected - reference_rejected) / |rejected|
        loss = sum over pairs of (c - r - 1 / (2 beta))^2, over normalizer

    `beta` is the paper's tau: the loss pulls the gap to 1 / (2 beta), so 0.1 means 5 nats, with
    lengths for 5 nats a token. Lengths count the answer's tokens; one of 0 counts as 1, so that an
    empty answer is finite. With them this is TRL's HEAD (`DPOTrainer._compute_loss`, "ipo");
    without them the equation as printed, on sums, and TRL's former `dpo_loss`, which took sums or
    averages as its caller liked. TRL counts the unshifted mask, which has one token more than are
    scored only if an answer starts at position 0.

    The margin is beta ((chosen - reference_chosen) - (rejected - reference_rejected)), TRL's reward
    margin, never length-normalized. The reference gets no gradient. No pairs give 0.
    """
    _check("ipo", beta)
    _check_lengths("ipo", chosen_lengths, rejected_lengths)
    ratios = (_log_ratio(chosen, reference_chosen), _log_ratio(rejected, reference_rejected))
    averages = (_average(ratios[0], chosen_lengths), _average(ratios[1], rejected_lengths))
    terms = _ipo_terms(*averages, beta)
    return _preference(terms, ratios, beta, weights, normalizer, reduction)


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
    normalizer: Number | None = None,
    weights: Float[Tensor, "*B"] | None = None,
    reduction: Reduction = "sum",
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
    _check("simpo", beta, label_smoothing)
    check_choice("loss_type", loss_type, ("sigmoid", "hinge", "robust"))
    if not 0 <= gamma < float("inf"):
        raise ValueError(f"simpo gamma is {gamma} but must be finite and >= 0: use beta / 4")
    for_chosen = _average(at_least_float32(chosen), chosen_lengths)
    for_rejected = _average(at_least_float32(rejected), rejected_lengths)
    terms = _pair_terms(loss_type, for_chosen - gamma / beta, for_rejected, beta, label_smoothing)
    averages = (for_chosen, for_rejected)
    return _preference(terms, averages, beta, weights, normalizer, reduction)


def _log_ratio(policy: Float[Tensor, "*B"], reference: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    return at_least_float32(policy) - at_least_float32(reference.detach())


def _average(values: Float[Tensor, "*B"], lengths: Tensor | None) -> Float[Tensor, "*B"]:
    return values if lengths is None else values / lengths.clamp(min=1)


def _ipo_terms(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], beta: Number
) -> Float[Tensor, "*B"]:
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def _preference(
    terms: Float[Tensor, "*B"],
    scores: tuple[Tensor, Tensor],
    beta: Number,
    weights: Float[Tensor, "*B"] | None,
    normalizer: Number | None,
    reduction: Reduction,
) -> PreferenceLoss:
    if weights is not None:
        terms = terms * weights.detach()
    chosen, rejected = (beta * score.detach() for score in scores)
    margin = chosen - rejected

    def reduced(values: Tensor) -> Tensor:
        return reduce_terms(values, normalizer, reduction)

    return PreferenceLoss(
        loss=reduced(terms),
        margin=reduced(margin),
        accuracy=reduced((margin > 0).to(margin.dtype)),
        chosen_reward=reduced(chosen),
        rejected_reward=reduced(rejected),
    )


def _check(name: str, beta: Number, label_smoothing: Number = 0.0) -> None:
    check_positive(f"{name} beta", beta, f"use {2.0 if name == 'simpo' else 0.1}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but must be in [0, 0.5):"
            " from 0.5 on, pairs teach the opposite; swap chosen and rejected instead"
        )


def _check_lengths(name: str, chosen: Tensor | None, rejected: Tensor | None) -> None:
    if (chosen is None) != (rejected is None):
        raise ValueError(
            f"{name} has the lengths of one side only, but compares averages with averages or sums"
            " with sums: pass chosen_lengths and rejected_lengths, or neither"
        )


def _need_lengths(kind: str, chosen: Tensor | None, rejected: Tensor | None) -> None:
    if chosen is None or rejected is None:
        raise ValueError(f"{kind} is per token: pass chosen_lengths and rejected_lengths")


def _check_mix(loss_types: Mapping[MixedType, Number], label_smoothing: Number) -> None:
    if not loss_types:
        raise ValueError("loss_types is empty: name a type with its weight, as {'sigmoid': 1.0}")
    if label_smoothing > 0 and not set(loss_types) & set(SMOOTHED):
        raise ValueError(
            f"label_smoothing is {label_smoothing} but {', '.join(loss_types)} have none: use 0"
        )


def _divergence_scores(
    log_ratios: Float[Tensor, "*B"], kind: FDivergence, f_alpha: Number
) -> Float[Tensor, "*B"]:
    """f'(u) at u = exp(log-ratio), without its constant: the scores of f-DPO (arXiv 2309.16240).

        reverse_kl        log u, which is DPO       js_divergence     log sigmoid(log u)
        forward_kl        -1 / u                    alpha_divergence  u^(a - 1) / (a - 1)

    a is `f_alpha`, 1 less the paper's alpha, as in TRL: 1 is reverse KL and 0 forward KL. Exponents
    above 80 count as 80, so that they are finite in float32.
    """
    check_choice("f_divergence_type", kind, get_args(FDivergence))
    if kind == "js_divergence":
        return logsigmoid(log_ratios)
    slope = -1.0 if kind == "forward_kl" else f_alpha - 1.0
    if kind == "reverse_kl" or abs(slope) < 1e-6:
        return log_ratios
    return (slope * log_ratios).clamp(max=LOG_RATIO_LIMIT).exp() / slope


def _pair_terms(
    kind: PreferenceType, chosen: Scores, rejected: Scores, beta: Number, e: Number
) -> Float[Tensor, "*B"]:
    """Loss of each pair from the scores of its answers; e is the label smoothing."""
    check_choice("loss_type", kind, tuple(_TERMS))
    _check_smoothing(kind, e)
    return _TERMS[kind](beta * chosen, beta * rejected, e)


def _check_divergence(kind: str, f_divergence_type: FDivergence) -> None:
    """Raise for types whose formula needs log-ratios if the scores are of another divergence."""
    if f_divergence_type != "reverse_kl" and kind in ("apo_zero", "apo_down"):
        raise ValueError(
            f"f_divergence_type is {f_divergence_type!r} but loss_type {kind!r} is defined on"
            " log-ratios: use 'reverse_kl', or 'sigmoid'"
        )


def _smoothed(z: Scores, e: Number) -> Scores:
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def _exo_pair(c: Scores, r: Scores, e: Number) -> Scores:
    z, smoothed = c - r, torch.tensor(e, dtype=c.dtype, device=c.device)
    right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-smoothed))
    return right + torch.sigmoid(-z) * (logsigmoid(-z) - smoothed.log())


_TERMS: Mapping[str, Callable[[Scores, Scores, Number], Tensor]] = {
    "sigmoid": lambda c, r, e: _smoothed(c - r, e),
    "sigmoid_norm": lambda c, r, e: _smoothed(c - r, e),
    "hinge": lambda c, r, _: torch.relu(1 - (c - r)),
    "robust": lambda c, r, e: (-(1 - e) * logsigmoid(c - r) + e * logsigmoid(r - c)) / (1 - 2 * e),
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


def sequence_logprobs(
    token_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    ld_alpha: Number | None = None,
    shared_lengths: Int[Tensor, "*B"] | None = None,
) -> Float[Tensor, "*B"]:
    """Log-probability of each answer: the sum over its tokens, 0 for an answer without any.

    With `mask.sum(-1)` as its length, it is the input of every preference loss.

    `ld_alpha` weighs the tokens beyond the first `shared_lengths` of an answer (LD-DPO, arXiv
    2409.06411): 1 changes nothing, 0 leaves them out. The shared length of a pair is that of its
    shorter answer; policy and reference are to be summed alike. Agrees with TRL's
    `DPOTrainer._compute_loss`.
    """
    values = torch.where(mask, at_least_float32(token_logprobs), 0.0)
    if ld_alpha is None and shared_lengths is None:
        return values.sum(-1)
    if ld_alpha is None or shared_lengths is None:
        raise ValueError(
            f"ld_alpha is {ld_alpha} and shared_lengths are"
            f" {'not ' if shared_lengths is None else ''}given: pass both, or neither"
        )
    repair = "1 weighs all tokens alike, 0 leaves out what is beyond the shared length"
    check_fraction("ld_alpha", ld_alpha, repair)
    beyond = mask.cumsum(-1) > shared_lengths.unsqueeze(-1)
    return torch.where(beyond, ld_alpha * values, values).sum(-1)


def wpo_weights(
    token_logprobs: Float[Tensor, "*B T"],
    collision_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B"]:
    """How typical each answer is of the policy, detached (WPO, arXiv 2406.11827, equation 2).

        w = exp(mean over tokens of (log p(token) - log sum over v of p(v)^2))

    A pair's weight is the product of those of its answers: `weights` of the preference losses. An
    answer without tokens has 1. `collision_logprobs` are those of the function of that name.
    Agrees with TRL's `use_weighting`.
    """
    aligned = at_least_float32(token_logprobs.detach()) - at_least_float32(
        collision_logprobs.detach()
    )
    return (torch.where(mask, aligned, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).exp()


def collision_logprobs(logits: Float[Tensor, "*B T V"]) -> Float[Tensor, "*B T"]:
    """Log-probability that two samples of a row are equal, log sum p^2; detached."""
    scores = at_least_float32(logits.detach())
    return (2 * scores).logsumexp(-1) - 2 * scores.logsumexp(-1)
