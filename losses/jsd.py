"""Generalized Jensen-Shannon divergence between aligned next-token distributions.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary, N tokens under
the mask.

Student and teacher rows must be aligned by the caller, as their contexts differ in length.

With `reduction="none"` every loss returns its terms per token [*B T], 0 outside of the mask and not
divided; their sum over the normalizer is the loss.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_jsd_beta,
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
        _check_probabilities(temperature, top_k)
        terms = divergence_terms(_floored_log(s), _floored_log(p), jsd_beta)
    else:
        if top_k is not None:
            s, p = _teacher_top_k(s, p, top_k)
        logprobs = (row_logprobs(s, temperature), row_logprobs(p, temperature))
        terms = divergence_terms(*logprobs, jsd_beta)
    per_token = clip_elements(terms, element_clip).sum(-1)
    return reduce_selected(per_token, mask, normalizer, reduction)


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


def clip_elements(terms: Float[Tensor, "N V"], limit: Number | None) -> Float[Tensor, "N V"]:
    """Bound each term from above; None changes nothing."""
    if limit is None:
        return terms
    if not limit > 0:
        raise ValueError(
            f"element_clip is {limit} but has to be > 0: use 0.05, or None for no clip"
        )
    return terms.clamp(max=limit)


def _floored_log(probabilities: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    return at_least_float32(probabilities).clamp(min=MIN_PROBABILITY).log()


def _check_probabilities(temperature: Number, top_k: int | None) -> None:
    if temperature != 1 or top_k is not None:
        raise ValueError(
            f"temperature is {temperature} and top_k is {top_k} but logits_are_probs, and"
            " probabilities are taken as they are: leave both out, or pass logits"
        )


def _teacher_top_k(
    student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"], top_k: int
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    check_top_k(top_k)
    chosen, ids = teacher.topk(min(top_k, teacher.shape[-1]), dim=-1)
    return student.gather(-1, ids), chosen


def _log_mixture(
    s_log: Float[Tensor, "N V"], p_log: Float[Tensor, "N V"], jsd_beta: Number
) -> Float[Tensor, "N V"]:
    """log((1 - jsd_beta) S + jsd_beta P), with a gradient also where both are 0."""
    dead = (s_log == -math.inf) & (p_log == -math.inf)
    student = torch.where(dead, 0.0, s_log + math.log1p(-jsd_beta))
    teacher = torch.where(dead, 0.0, p_log + math.log(jsd_beta))
    return torch.where(dead, -math.inf, torch.logaddexp(student, teacher))
