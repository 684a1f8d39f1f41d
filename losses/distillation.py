"""Distillation losses: move the student's next-token distribution towards a teacher's.

TAID is here: a teacher that is interpolated from the student, at a pace set by the student's loss.
Its loss takes the position t as a number; the schedule moves t and uses no tensors. So is a teacher
whose weights are the moving average of the student's, by name and in place. Callers count steps,
average losses over ranks, and decide when weights move. The other families have modules of their
own; all are exported here.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary, N tokens under
the mask.

With `reduction="none"` every loss returns its terms per token [*B T], 0 outside of the mask and not
divided; their sum over the normalizer is the loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.entropy import (
    DistillationFigures,
    distillation_figures,
    entropy,
    entropy_gated_kl,
    entropy_opd_from_logprobs,
    entropy_opd_loss,
)
from composer_mesh.losses.jsd import (
    divergence_terms,
    generalized_jsd,
    importance_weights,
    kl_terms,
    row_logprobs,
    sampled_reverse_kl,
    sdpo_loss,
    topk_distillation,
)
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_fraction,
    check_temperature,
    reduce_selected,
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


def taid_loss(
    student_logits: Float[Tensor, "*B T V"],
    teacher_logits: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    t: Number,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Cross-entropy to the interpolated teacher of TAID (arXiv 2501.16937), in nats.

        p_t  = softmax((1 - t) constant(student) + t teacher)
        loss = -sum over tokens and entries of p_t log softmax(student), over normalizer

    The logits are interpolated, not the probabilities, after the temperature divides both. It is
    no divergence: at t = 0 it is the student's entropy with a gradient of 0, at t = 1 the
    cross-entropy to the teacher, with gradient S - P per token. `normalizer` is the token count of
    the whole step. Neither the teacher nor the student inside p_t gets a gradient.

    Entries whose student logit is infinite contribute 0, also where p_t is positive. Source: TAID,
    `TAID.compute_loss` and `forward_kl`. Differs: p_t and the log-softmax are at least float32
    (upstream takes float64 down to float32); a vocabulary padded with -inf is right at t = 0 and
    t = 1 too, and an empty mask gives 0, where upstream gives NaN.
    """
    check_fraction("t", t, "0 is the student itself, 1 is the teacher")
    check_temperature(temperature)
    s = at_least_float32(student_logits[mask]) / temperature
    p = at_least_float32(teacher_logits.detach()[mask]) / temperature
    target = torch.softmax(_between(s.detach(), p, t), dim=-1)
    logprobs = torch.where(torch.isinf(s), 0.0, torch.log_softmax(s, dim=-1))
    return reduce_selected((-target * logprobs).sum(-1), mask, normalizer, reduction)


def _between(
    student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"], t: Number
) -> Float[Tensor, "N V"]:
    # 0 * -inf is NaN, so neither endpoint reads the other side.
    if t == 0:
        return student
    if t == 1:
        return teacher
    return (1 - t) * student + t * teacher


@dataclass
class TaidSchedule:
    """The position t, and its adaptive schedule, which a falling loss accelerates.

        first update   remembers the loss; t stays t_start
        then           change   = (previous - loss) / (previous + 1e-15)
                       momentum = beta momentum + (1 - beta) change
                       target   = t_start + (t_end - t_start) step / steps
                       t        = min(t_end, max(target, t + alpha sigmoid(momentum) (1 - t)))
        not adaptive   t = target, from the second update on, and never clipped

    A step's loss is computed with the current `t`; then `update` is called with that loss (the mean
    over the whole step), the optimizer steps done before it and those of the whole run.
    Adaptive, t never falls. At momentum 0 the addition is alpha (1 - t) / 2, so with the default
    alpha the linear target leads in runs of fewer than a few thousand steps.

    Source: TAID, `TAID.update_t`, whose defaults these are. Differs: float64 instead of float32,
    and a loss that is not finite is refused instead of making t NaN for good.
    """

    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    adaptive: bool = True
    t: float = field(init=False)
    _previous: float | None = field(init=False, default=None)
    _momentum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.t_start < 1:
            raise ValueError(f"t_start is {self.t_start} but must be in [0, 1): use 0.4")
        if not self.t_start <= self.t_end <= 1:
            raise ValueError(
                f"t_end is {self.t_end} but must be in [{self.t_start}, 1], since t only"
                " rises: use 1.0"
            )
        check_fraction("taid alpha", self.alpha, "use 0.0005")
        check_fraction("taid beta", self.beta, "use 0.99")
        self.t = self.t_start

    def update(self, loss: float, step: int, steps: int) -> float:
        """Move t after a step with this loss, and return it."""
        if not math.isfinite(loss):
            raise ValueError(f"loss is {loss} but must be finite: leave out the update")
        if not 0 <= step <= steps or steps < 1:
            raise ValueError(
                f"step is {step} of {steps} but must be in [0, steps], with steps >= 1:"
                " pass the optimizer steps done and those of the whole run"
            )
        if self._previous is not None:
            target = self.t_start + (self.t_end - self.t_start) * step / steps
            hurried = self.t + self._addition(self._previous, loss)
            self.t = min(self.t_end, max(target, hurried)) if self.adaptive else target
        self._previous = float(loss)
        return self.t

    def state_dict(self) -> dict[str, float | None]:
        """Return the state for a checkpoint, without the settings."""
        return {"t": self.t, "previous_loss": self._previous, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore the state of `state_dict`."""
        t, momentum = state["t"], state["momentum"]
        if t is None or momentum is None:
            raise ValueError(f"t is {t} and momentum {momentum} but both are numbers in a state")
        self.t, self._momentum, self._previous = t, momentum, state["previous_loss"]

    def _addition(self, previous: float, loss: float) -> float:
        change = (previous - loss) / (previous + 1e-15)
        self._momentum = self.beta * self._momentum + (1 - self.beta) * change
        sigmoid = (1 + math.tanh(self._momentum / 2)) / 2  # without overflow on either side
        return self.alpha * sigmoid * (1 - self.t)


@torch.no_grad()
def ema_update(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], rate: Number) -> None:
    """Interpolate each of the teacher's tensors towards the student's, in place.

        teacher <- (1 - rate) teacher + rate student

    `rate` is 1 less a decay: OPSD's `ema_decay` of 0.999 is 0.001 here, and 1 copies. Integers,
    such as counters in buffers, are copied. The average has the teacher's dtype: in half precision
    an update below its resolution is lost, so keep a slow one in float32. Student tensors that the
    teacher lacks are ignored.
    """
    missing = sorted(set(teacher) - set(student))
    if missing:
        raise ValueError(
            f"{len(missing)} of the teacher's {len(teacher)} tensors are not the student's (first:"
            f" {missing[0]}): pass the weights of one architecture under the same names"
        )
    for name, tensor in teacher.items():
        ema_update_tensor(tensor, student[name], rate)


@torch.no_grad()
def ema_update_tensor(teacher: Tensor, student: Tensor, rate: Number) -> None:
    """Apply `ema_update` to one tensor."""
    check_fraction("rate", rate, "0 keeps the teacher, 1 copies the student")
    if teacher.shape != student.shape:
        raise ValueError(
            f"the teacher's tensor has shape {tuple(teacher.shape)} but the student's"
            f" {tuple(student.shape)}: pass the weights of one architecture"
        )
    if rate == 1 or not teacher.is_floating_point():
        teacher.copy_(student)
    else:
        teacher.lerp_(student.to(teacher), rate)
