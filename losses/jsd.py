"""Divergences of aligned next-token distributions: on all entries, on a few, on the sampled one.

`generalized_jsd` is on whole rows; SDPO's top-k has a bucket for the rest, and `sampled_reverse_kl`
knows the sampled tokens alone.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary, K entries kept
per token, N tokens under the mask.

Student and teacher rows must be aligned by the caller, as their contexts differ in length. Callers
build the teacher's context and weights.

With `reduction="none"` every loss returns its terms per token [*B T], 0 outside of the mask and not
divided; their sum over the normalizer is the loss.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_jsd_beta,
    check_positive,
    check_temperature,
    check_top_k,
    reduce_selected,
)

# OPSD's lower bound of a given probability, applied before the logarithm.
MIN_PROBABILITY = 1e-8


def generalized_jsd(
    student: Float[Tensor, "*B T V"],
    teacher: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    jsd_beta: Number,
    temperature: Number = 1.0,
    element_clip: Number | None = None,
    top_k: int | None = None,
    logits_are_probs: bool = False,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649), in nats per normalizer.

        S = softmax(student / temperature)    P = softmax(teacher / temperature)
        b = 0      KL(P || S), forward: cover what the teacher does
        0 < b < 1  b KL(P || M) + (1 - b) KL(S || M),  M = (1 - b) S + b P
        b = 1      KL(S || P), reverse: avoid what the teacher does not do

    b is `jsd_beta`, which GKD calls beta and SDPO alpha; it is no weight of a channel.

    Both tensors may be logits or log-probabilities, which are logits too; the temperature divides
    both and the loss is not multiplied by its square. The endpoints are exact special cases and
    not limits: the mixture term itself goes to 0 at either end. The teacher gets no gradient.

    `element_clip` (OPSD's `token_clip`) is an upper bound on each (token, vocabulary entry) term
    before anything is summed: a clipped term has no gradient and the loss can become negative,
    since nothing bounds the negative terms. No term exceeds max(-log b, -log(1 - b)), so from
    there on (0.7 at b = 0.5) the clip does nothing. `top_k` keeps the teacher's k likeliest
    entries of each row and renormalizes both sides over them; k >= V keeps all.

    With `logits_are_probs` both are probabilities, as OPSD takes them: an entry below 1e-8 counts
    as 1e-8, without a gradient, and rows are not renormalized, so they need not sum to 1. To have
    them normalized, pass their logarithms as logits instead.

    Only rows under the mask are computed. Entries that are -inf on both sides (a padded
    vocabulary) contribute 0; -inf on one side gives infinity where the divergence is infinite.
    Upstream (TRL and OPSD, `generalized_jsd_loss`) gives NaN in both cases, computes in half
    precision where the logits are, and OPSD also gives NaN for an empty mask, which is 0 here.
    Their `batchmean` is the token count as normalizer, or B where they get no labels. OPSD with
    `logits_are_probs` ignores temperature and top_k, which is an error here.
    """
    check_jsd_beta(jsd_beta)
    check_temperature(temperature)
    s, p = student[mask], teacher.detach()[mask]
    if logits_are_probs:
        if temperature != 1 or top_k is not None:
            raise ValueError(
                f"temperature is {temperature} and top_k is {top_k} but logits_are_probs, and"
                " probabilities are taken as they are: leave both out, or pass logits"
            )
        logprobs = (_floored_log(s), _floored_log(p))
    else:
        ours, theirs = (at_least_float32(rows) / temperature for rows in (s, p))
        logprobs = _shared_support(ours, theirs, top_k, False, "teacher")
    terms = divergence_terms(*logprobs, jsd_beta)
    check_positive("element_clip", element_clip, "use 0.05, or None for no clip")
    if element_clip is not None:
        terms = terms.clamp(max=element_clip)
    return reduce_selected(terms.sum(-1), mask, normalizer, reduction)


def row_logprobs(scores: Float[Tensor, "N V"], temperature: Number = 1.0) -> Float[Tensor, "N V"]:
    """Log-softmax of each row over the temperature, at least in float32."""
    return torch.log_softmax(at_least_float32(scores) / temperature, dim=-1)


def divergence_terms(
    s_log: Float[Tensor, "N V"], p_log: Float[Tensor, "N V"], jsd_beta: Number
) -> Float[Tensor, "N V"]:
    """Unreduced terms of `generalized_jsd` from normalized rows; their sum is the divergence.

    Rows need not sum to 1: with buckets left out the terms are those of the entries given.
    """
    if jsd_beta == 0:
        return kl_terms(p_log, s_log)
    if jsd_beta == 1:
        return kl_terms(s_log, p_log)
    m_log = _log_mixture(s_log, p_log, jsd_beta)
    return jsd_beta * kl_terms(p_log, m_log) + (1 - jsd_beta) * kl_terms(s_log, m_log)


def kl_terms(p_log: Float[Tensor, "N V"], q_log: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Terms of KL(p || q); 0 where p is 0, whatever q is."""
    difference = torch.where(p_log > -math.inf, p_log - q_log, 0.0)
    return p_log.exp() * difference


def _floored_log(probabilities: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    return at_least_float32(probabilities).clamp(min=MIN_PROBABILITY).log()


def _log_mixture(
    s_log: Float[Tensor, "N V"], p_log: Float[Tensor, "N V"], jsd_beta: Number
) -> Float[Tensor, "N V"]:
    """log((1 - jsd_beta) S + jsd_beta P), with a gradient also where both are 0."""
    dead = (s_log == -math.inf) & (p_log == -math.inf)
    student = torch.where(dead, 0.0, s_log + math.log1p(-jsd_beta))
    teacher = torch.where(dead, 0.0, p_log + math.log(jsd_beta))
    return torch.where(dead, -math.inf, torch.logaddexp(student, teacher))


# Bound of log-ratios before the clip (SDPO's bound).
LOG_IMPORTANCE_LIMIT = 20.0


def sampled_reverse_kl(
    logprobs: Float[Tensor, "*B T"],
    teacher_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    old_logprobs: Float[Tensor, "*B T"] | None = None,
    is_clip: Number | None = 2.0,
    weights: Float[Tensor, "*B T"] | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Reverse KL(student || teacher) from sampled tokens, as REINFORCE with a dense reward.

        A    = constant(teacher_logprobs - logprobs)
        loss = -sum of w A logprobs over the masked tokens / normalizer

    On tokens that the student sampled, the gradient is an unbiased estimate of that of the
    KL at each token's context; the value is no divergence and may have either sign. A larger KL
    does not mean a larger loss: watch the mean of -A instead.

    With `old_logprobs`, the student's when it sampled, w is `importance_weights`; `weights`
    multiplies in further constants. Either is detached, as are A and the teacher. Log-probs
    are nats per token, both under the temperature of sampling; `normalizer` is the token count
    of the whole step.

    Source: OPSD (`compute_loss` with `use_tinker_loss`), SDPO (`compute_self_distillation_loss`
    without full logits) and TRL (`compute_sampled_token_self_distillation_loss`), which agree.
    Differs: an empty mask gives 0, where OPSD gives NaN; TRL averages each sequence first, which
    is `weights` of one over the sequence's tokens and the number of sequences as normalizer.
    """
    student = at_least_float32(logprobs[mask])
    advantage = at_least_float32(teacher_logprobs.detach()[mask]) - student.detach()
    per_token = -advantage * student
    if old_logprobs is not None:
        per_token = per_token * importance_weights(student, old_logprobs[mask], is_clip)
    return reduce_selected(_weighted(per_token, weights, mask), mask, normalizer, reduction)


def importance_weights(
    logprobs: Float[Tensor, "*B"], old_logprobs: Float[Tensor, "*B"], is_clip: Number | None = 2.0
) -> Float[Tensor, "*B"]:
    """Detached weights min(exp(logprobs - old_logprobs), is_clip), for tokens sampled earlier.

    Log-ratios count as at most 20 either way; None for `is_clip` gives weights of 1. Source:
    SDPO (arXiv 2601.20802, `compute_self_distillation_loss`), TRL
    (`apply_importance_sampling_clipping`).
    """
    if is_clip is None:
        return torch.ones_like(at_least_float32(logprobs.detach()))
    check_positive("is_clip", is_clip, "use 2.0, or None for no weights")
    log_ratio = at_least_float32(logprobs.detach()) - at_least_float32(old_logprobs.detach())
    log_ratio = log_ratio.clamp(-LOG_IMPORTANCE_LIMIT, LOG_IMPORTANCE_LIMIT)
    return log_ratio.exp().clamp(max=is_clip)


Choice = Literal["student", "teacher"]

# SDPO bounds the mass of the kept entries to exp(-1e-7) of a row, so that the rest is never empty.
MAX_LOG_KEPT = -1e-7
MIN_LOG_TAIL = math.log(-math.expm1(MAX_LOG_KEPT))


def sdpo_loss(
    student_logits: Float[Tensor, "*B T V"],
    teacher_logits: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    jsd_beta: Number = 0.5,
    top_k: int | None = 100,
    tail: bool = True,
    choice: Choice = "student",
    targets: Int[Tensor, "*B T"] | None = None,
    old_logprobs: Float[Tensor, "*B T"] | None = None,
    is_clip: Number | None = 2.0,
    weights: Float[Tensor, "*B T"] | None = None,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """SDPO's self-distillation (arXiv 2601.20802), in nats per normalizer.

        ids  = the student's top_k entries of each row (or the teacher's, by `choice`)
        S, T = the probabilities of ids, and with `tail` one bucket for all others;
               without, renormalized over ids
        loss = sum over tokens of w * D(S, T), over normalizer

    D is `generalized_jsd` at `jsd_beta`, SDPO's alpha: 0 is KL(T || S), 1 is KL(S || T).
    `top_k` None or >= V is the whole vocabulary. The temperature divides both logits first. With
    `old_logprobs` (the student's when it sampled) and `targets` (the sampled ids), w is
    `importance_weights` capped at `is_clip`; else 1. `weights` multiplies in further constants.
    `normalizer` is the token count of the whole step. Teacher, w and the choice of ids get no
    gradient.

    Source: SDPO, `compute_self_distillation_loss` with the logits handling of its `dp_actor`; the
    defaults are its README's. TRL's SDPO has the same terms, defaults alpha 1 and no tail, and
    averages each sequence first. Differs: in float32 the tail is summed from the entries left
    out, which gives what upstream gives in float64 (upstream's own float32 tail is rounding noise
    once the top k hold nearly everything); its mass counts as at least 1e-7 here as there. Entries
    that are -inf on both sides contribute 0, where upstream gives NaN. Upstream refuses an
    `is_clip` without old log-probs; here, as in TRL, it is then unused.
    """
    check_jsd_beta(jsd_beta)
    check_temperature(temperature)
    s = at_least_float32(student_logits[mask]) / temperature
    t = at_least_float32(teacher_logits.detach()[mask]) / temperature
    s_log, t_log = _shared_support(s, t, top_k, tail, choice)
    per_token = divergence_terms(s_log, t_log, jsd_beta).sum(-1)
    if old_logprobs is not None:
        sampled = _sampled_logprobs(s.detach(), targets, mask)
        per_token = per_token * importance_weights(sampled, old_logprobs[mask], is_clip)
    return reduce_selected(_weighted(per_token, weights, mask), mask, normalizer, reduction)


def topk_distillation(
    student_logprobs: Float[Tensor, "*B T K"],
    teacher_logprobs: Float[Tensor, "*B T K"],
    mask: Bool[Tensor, "*B T"],
    *,
    jsd_beta: Number,
    tail: bool = True,
    weights: Float[Tensor, "*B T"] | None = None,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """`sdpo_loss` from log-probs gathered at the same K ids on both sides.

    They are log-probabilities over the whole vocabulary, in nats. With `tail` the rest of each row
    is one more bucket of 1 - sum(p), at least 1e-7; without, both sides are renormalized over the
    K. `weights` are constants per token, as from `importance_weights`.

    Source: SDPO, `compute_self_distillation_loss` with `distillation_topk`. Differs: the tail is
    computed in float64. It is still a difference to 1: log-probs rounded to float32 give a tail to
    about 1e-6, and if the rest matters below that, `sdpo_loss` on logits is exact.
    """
    check_jsd_beta(jsd_beta)
    s_log = _normalized(at_least_float32(student_logprobs[mask]), tail)
    t_log = _normalized(at_least_float32(teacher_logprobs.detach()[mask]), tail)
    per_token = divergence_terms(s_log, t_log, jsd_beta).sum(-1)
    return reduce_selected(_weighted(per_token, weights, mask), mask, normalizer, reduction)


def _shared_support(
    s: Float[Tensor, "N V"],
    t: Float[Tensor, "N V"],
    top_k: int | None,
    tail: bool,
    choice: Choice,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    """Log-probs of both sides over the entries chosen, with the tail bucket last."""
    if choice not in ("student", "teacher"):
        raise ValueError(f"choice is {choice!r}: use 'student' (SDPO) or 'teacher' (OPSD)")
    if top_k is None:
        return torch.log_softmax(s, dim=-1), torch.log_softmax(t, dim=-1)
    check_top_k(top_k)
    chooser = s.detach() if choice == "student" else t
    ids = chooser.topk(min(top_k, s.shape[-1]), dim=-1).indices
    return _on_support(s, ids, tail), _on_support(t, ids, tail)


def _on_support(
    scores: Float[Tensor, "N V"], ids: Int[Tensor, "N K"], tail: bool
) -> Float[Tensor, "N L"]:
    chosen = scores.gather(-1, ids)
    if not tail:
        return torch.log_softmax(chosen, dim=-1)
    if scores.dtype == torch.float64:
        return _normalized(chosen - scores.logsumexp(-1, keepdim=True), tail)
    # A float32 difference to 1 is noise if the tail is small, so the others are summed.
    logprobs = torch.log_softmax(scores, dim=-1)
    rest = _log_mass(logprobs.scatter(-1, ids, -math.inf)).clamp(min=MIN_LOG_TAIL)
    return torch.cat([logprobs.gather(-1, ids), rest], dim=-1)


def _normalized(logprobs: Float[Tensor, "N K"], tail: bool) -> Float[Tensor, "N L"]:
    if not tail:
        return torch.log_softmax(logprobs, dim=-1)
    kept = _log_mass(logprobs.double()).clamp(max=MAX_LOG_KEPT)
    rest = torch.log(-torch.expm1(kept)).to(logprobs.dtype)
    return torch.cat([logprobs, rest], dim=-1)


def _log_mass(scores: Float[Tensor, "N V"]) -> Float[Tensor, "N 1"]:
    """Log-sum-exp of each row; -inf, with a gradient of 0, if nothing is left to sum."""
    empty = (scores == -math.inf).all(-1, keepdim=True)
    mass = torch.where(empty, 0.0, scores).logsumexp(-1, keepdim=True)
    return torch.where(empty, -math.inf, mass)


def _sampled_logprobs(
    scores: Float[Tensor, "N V"], targets: Int[Tensor, "*B T"] | None, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "N"]:
    if targets is None:
        raise ValueError(
            "old_logprobs are given but targets are None: pass the sampled ids, or no old_logprobs"
        )
    chosen = scores.gather(-1, targets[mask].long().unsqueeze(-1)).squeeze(-1)
    return chosen - scores.logsumexp(-1)


def _weighted(
    per_token: Float[Tensor, "N"],
    weights: Float[Tensor, "*B T"] | None,
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "N"]:
    return per_token if weights is None else per_token * weights.detach()[mask]
