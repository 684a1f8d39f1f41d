"""Distillation losses: move the student's next-token distribution towards a teacher's.

Index only: each family is defined in its own module.
"""

from composer_mesh.losses.jsd import divergence_terms, generalized_jsd, kl_terms, row_logprobs
from composer_mesh.losses.opd import (
    DistillationFigures,
    distillation_figures,
    entropy,
    entropy_gated_kl,
    entropy_opd_from_logprobs,
    entropy_opd_loss,
)
from composer_mesh.losses.taid import TaidSchedule, taid_loss
from composer_mesh.losses.teacher_weights import ema_update, ema_update_tensor
from composer_mesh.losses.topk import (
    importance_weights,
    sampled_reverse_kl,
    sdpo_loss,
    topk_distillation,
)

__all__ = [
    "DistillationFigures",
    "TaidSchedule",
    "distillation_figures",
    "divergence_terms",
    "ema_update",
    "ema_update_tensor",
    "entropy",
    "entropy_gated_kl",
    "entropy_opd_from_logprobs",
    "entropy_opd_loss",
    "generalized_jsd",
    "importance_weights",
    "kl_terms",
    "row_logprobs",
    "sampled_reverse_kl",
    "sdpo_loss",
    "taid_loss",
    "topk_distillation",
]
