"""Distillation losses: move the student's next-token distribution towards a teacher's.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary, N tokens under
the mask.

Student and teacher rows are already aligned, although their contexts differ in length: nothing
here shifts, looks for the response or runs a model.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.reductions import Number, at_least_float32, normalized_sum


def generalized_jsd(
    student: Float[Tensor, "*B T V"],
    teacher: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    beta: Number,
    temperature: Number = 1.0,
    normalizer: Number,
) -> Float[Tensor, ""]:
    """Generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649), in nats per normalizer.

        S = softmax(student / temperature)    P = softmax(teacher / temperature)
        beta = 0      KL(P || S), forward: cover what the teacher does
        0 < beta < 1  beta KL(P || M) + (1 - beta) KL(S || M),  M = (1 - beta) S + beta P
        beta = 1      KL(S || P), reverse: avoid what the teacher does not do

    Both tensors may be logits or log-probabilities, which are logits too; the temperature divides
    both and the loss is not multiplied by its square. The endpoints are exact special cases and
    not limits: the mixture term itself goes to 0 at either end. The teacher gets no gradient.

    Only rows under the mask are computed. Entries that are -inf on both sides (a padded
    vocabulary) contribute 0; -inf on one side gives infinity where the divergence is infinite.
    Upstream (TRL, OPSD) gives NaN in both cases, computes in half precision where the logits are,
    and OPSD also gives NaN for an empty mask, which is 0 here.
    """
    if not 0 <= beta <= 1:
        raise ValueError(
            f"beta is {beta} but has to be in [0, 1]: 0 is forward KL, 1 is reverse KL"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature} but has to be > 0: use 1.0 to switch it off"
        )
    s_log = _log_softmax(student[mask], temperature)
    p_log = _log_softmax(teacher.detach()[mask], temperature)
    return normalized_sum(_divergence(s_log, p_log, beta), normalizer)


def _divergence(
    s_log: Float[Tensor, "N V"], p_log: Float[Tensor, "N V"], beta: Number
) -> Float[Tensor, "N V"]:
    if beta == 0:
        return _kl(p_log, s_log)
    if beta == 1:
        return _kl(s_log, p_log)
    m_log = _log_mixture(s_log, p_log, beta)
    return beta * _kl(p_log, m_log) + (1 - beta) * _kl(s_log, m_log)


def _log_softmax(scores: Float[Tensor, "N V"], temperature: Number) -> Float[Tensor, "N V"]:
    return torch.log_softmax(at_least_float32(scores) / temperature, dim=-1)


def _kl(p_log: Float[Tensor, "N V"], q_log: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Terms of KL(p || q); 0 where p is 0, whatever q is."""
    difference = torch.where(p_log > -math.inf, p_log - q_log, 0.0)
    return p_log.exp() * difference


def _log_mixture(
    s_log: Float[Tensor, "N V"], p_log: Float[Tensor, "N V"], beta: Number
) -> Float[Tensor, "N V"]:
    """log((1 - beta) S + beta P), with a gradient also where both are 0."""
    dead = (s_log == -math.inf) & (p_log == -math.inf)
    student = torch.where(dead, 0.0, s_log + math.log1p(-beta))
    teacher = torch.where(dead, 0.0, p_log + math.log(beta))
    return torch.where(dead, -math.inf, torch.logaddexp(student, teacher))
