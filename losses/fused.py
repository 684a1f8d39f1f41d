"""Fused linear head and loss: from hidden states to log-probs or a divergence, block by block.

The scores of a block are freed before those of the next are computed, so the memory besides
inputs and gradients does not grow with rows times vocabulary. Blocks of a divergence are whole
rows, those of log-probs are columns of the vocabulary for all rows. Gradients are exact; the
teacher gets none. Scores, sums and accumulated gradients are float32 or better, also if hidden
states and heads are bfloat16: then gradients take float32 sums of their own size while they are
computed, but for the head's by log-probs. With `softcap` c, scores before the temperature are
`c tanh(z / c)` of the head's own z, as in Gemma.

Axes: N rows (tokens under the mask), H hidden size, K hidden size of the teacher, V vocabulary, R
rows of one block.

Callers run the model, select rows and shift: row n is the prediction of target n. Double backward
is not supported. The idea is that of Liger's chunked losses and of PRIME-RL's fused head.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_mesh.losses.blocks import (
    HeadGradients,
    JsdRule,
    LinearHead,
    RowLoss,
    Rule,
    add_product,
    autograd_rule,
    default_block,
    given_scores,
    on_half_units,
    one_pass,
    put_product,
    rows_per_block,
    softcapped,
    tiles,
)
from composer_mesh.losses.preference import collision_logprobs
from composer_mesh.losses.reductions import (
    Number,
    at_least_float32,
    check_jsd_beta,
    check_positive,
    check_temperature,
    normalized_sum,
)

ScoresLoss = Callable[[Float[Tensor, "R V"], slice], Float[Tensor, ""]]
"""A loss on a block's student scores and its slice of the rows."""

Caps = tuple[Number | None, Number | None]
"""The caps of two heads: student's, teacher's."""


def linear_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, "N"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    block: int | None = None,
) -> Float[Tensor, "N"]:
    """Log-probability of each target under `softmax((hidden @ weight.T + bias) / temperature)`.

    In nats, float32 or float64; equals `token_logprobs` on those scores. The forward keeps one
    number a row and the backward makes the scores again: four matrix products for the naive three.
    Rows whose gradient is 0, such as clipped tokens, cost nothing in the backward. `block` is the
    size of the scratch in numbers, by default 2^22 on a CPU and 2^26 on an accelerator. A target
    outside of the vocabulary has the log-prob nan.
    """
    check_linear(temperature, block, softcap)
    size = block or default_block(hidden)
    return _LinearLogprobs.apply(hidden, weight, bias, targets, temperature, size, softcap)


def linear_logits(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, "V"] | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
) -> Float[Tensor, "N V"]:
    """Scores `(hidden @ weight.T + bias) / temperature` in float32 at least, all at once.

    `softcap` is that of the fused losses.
    """
    check_temperature(temperature)
    head = None if bias is None else at_least_float32(bias)
    scores = torch.nn.functional.linear(at_least_float32(hidden), at_least_float32(weight), head)
    scores = softcapped(scores, softcap)
    return scores if temperature == 1 else scores / temperature


@torch.no_grad()
def linear_collision_logprobs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    softcap: Number | None = None,
    block: int | None = None,
) -> Float[Tensor, "N"]:
    """`collision_logprobs` of the head's scores, without a gradient: what `wpo_weights` needs."""
    check_linear(1.0, block, softcap)
    head = LinearHead(weight, bias, 1.0, sum_dtype(hidden), softcap)
    found = hidden.new_empty((len(hidden), 1), dtype=head.dtype)
    for rows, scores in head.scores(hidden, block or default_block(hidden)):
        for part, tile in tiles(found[rows], scores):
            part.copy_(collision_logprobs(tile).unsqueeze(-1))
    return found.squeeze(-1)


def linear_jsd(
    student_hidden: Float[Tensor, "N H"],
    student_weight: Float[Tensor, "V H"],
    teacher_hidden: Float[Tensor, "N K"],
    teacher_weight: Float[Tensor, "V K"] | None,
    *,
    jsd_beta: Number,
    temperature: Number = 1.0,
    normalizer: Number,
    student_bias: Float[Tensor, "V"] | None = None,
    teacher_bias: Float[Tensor, "V"] | None = None,
    student_softcap: Number | None = None,
    teacher_softcap: Number | None = None,
    block: int | None = None,
    entropies: Float[Tensor, "2"] | None = None,
    divergences: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, ""]:
    """Generalized JSD between two linear heads: `generalized_jsd` on their scores, summed.

    Formula, endpoints and units are those of `generalized_jsd`; rows under no mask are not passed.
    The teacher may have another hidden size, not another vocabulary; without a weight, what is
    passed as its hidden states are its scores, K = V. It gets no gradient, also where its head is
    the student's own. Gradients are written out by hand and computed in the
    forward, while the scores are there: four matrix products, as in the naive way. To `entropies`
    are added those of student and teacher over the normalizer, as `distillation_figures` has them;
    `divergences` takes each row's own divergence in nats, not divided, without a gradient.

    Differs from `generalized_jsd`: scores have to be finite, so a padded vocabulary is a large
    negative bias and not -inf.
    """
    check_jsd_beta(jsd_beta)
    check_linear(temperature, block, student_softcap, teacher_softcap)
    one = normalized_sum(student_hidden.new_ones((1,), dtype=torch.float64), normalizer)
    sink = [] if entropies is None else [entropies]
    by_row = [] if divergences is None else [divergences]
    rule = JsdRule(jsd_beta, temperature, float(one), sink, by_row)
    student = (student_hidden, student_weight, student_bias)
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    size = block or default_block(student_hidden)
    caps = (student_softcap, teacher_softcap)
    loss: Tensor = _LinearDivergence.apply(
        *student, *teacher, temperature, rule, size, torch.is_grad_enabled(), caps
    )
    for figures in (sink, by_row):
        figures.clear()  # a second backward runs the rule again
    return loss


def linear_distillation(
    loss: RowLoss,
    student_hidden: Float[Tensor, "N H"],
    student_weight: Float[Tensor, "V H"],
    teacher_hidden: Float[Tensor, "N K"],
    teacher_weight: Float[Tensor, "V K"] | None,
    *,
    student_bias: Float[Tensor, "V"] | None = None,
    teacher_bias: Float[Tensor, "V"] | None = None,
    student_softcap: Number | None = None,
    teacher_softcap: Number | None = None,
    block: int | None = None,
) -> Float[Tensor, ""]:
    """The sum over blocks of any loss on two rows of scores, such as TAID or SDPO's top-k.

    `loss(student, teacher, rows)` gets the float32 or float64 scores of a block and its place among
    the N rows, and returns a scalar: a sum over rows, already divided by its normalizer. Autograd
    differentiates it block by block, so memory is that of the loss on `block` scores. It must not
    keep the scores, whose memory the next block takes. The teacher's scores get no gradient;
    without a weight, what is passed as its hidden states are its scores.
    """
    check_linear(1.0, block, student_softcap, teacher_softcap)
    student = (student_hidden, student_weight, student_bias)
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    size = block or default_block(student_hidden)
    caps = (student_softcap, teacher_softcap)
    return _LinearDivergence.apply(
        *student, *teacher, 1.0, autograd_rule(loss), size, torch.is_grad_enabled(), caps
    )


def linear_scores(
    loss: ScoresLoss,
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    softcap: Number | None = None,
    block: int | None = None,
) -> Float[Tensor, ""]:
    """The sum over blocks of any loss on the rows' own scores; the rest is `linear_distillation`.

    For losses whose teacher is known by less than a distribution, such as its top k entries.
    """
    return linear_distillation(
        lambda own, _, rows: loss(own, rows),
        hidden,
        weight,
        hidden.new_empty(len(hidden), 0),
        None,
        student_bias=bias,
        student_softcap=softcap,
        block=block,
    )


class _LinearLogprobs(torch.autograd.Function):
    """Log-probs of targets; keeps the log of each row's partition sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Number,
        block: int,
        softcap: Number | None,
    ) -> Tensor:
        head = LinearHead(weight, bias, temperature, sum_dtype(hidden), softcap)
        picked = targets.long().unsqueeze(-1)
        peak = hidden.new_full((len(hidden), 1), -torch.inf, dtype=head.dtype)
        total, chosen = torch.zeros_like(peak), torch.full_like(peak, torch.nan)
        work = one_pass(_add_columns, hidden.device)
        for columns, scores in head.scores_by_columns(hidden, block):
            for parts in tiles(scores, picked - columns.start, peak, total, chosen):
                work(*parts)
        log_z = peak.add_(total.log_())
        ctx.save_for_backward(hidden, weight, bias, picked, log_z)
        ctx.temperature, ctx.block, ctx.softcap = temperature, block, softcap
        return (chosen - log_z).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, picked, log_z = ctx.saved_tensors
        head = LinearHead(weight, bias, ctx.temperature, log_z.dtype, ctx.softcap)
        active = gradient.ne(0).nonzero().squeeze(-1)
        some, picked, log_z = hidden[active], picked[active], log_z[active]
        factor = (gradient[active] / ctx.temperature).unsqueeze(-1)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(one, dtype=dtype) if one is not None and wanted else None
            for one, dtype, wanted in zip(
                (some, weight, bias),
                (head.dtype, weight.dtype, head.dtype),
                ctx.needs_input_grad,
                strict=False,
            )
        )
        work = one_pass(_pull_of_columns, hidden.device)
        for columns, scores in head.scores_by_columns(some, ctx.block):
            slopes = head.slopes(scores)
            for parts in tiles(scores, picked - columns.start, log_z, factor):
                work(*parts)
            if slopes is not None:
                scores.mul_(slopes)
            if of_bias is not None:
                of_bias[columns] = scores.sum(0)
            pull = scores.to(weight.dtype) if on_half_units(weight, scores) else scores
            if of_hidden is not None:
                add_product(pull, weight[columns], of_hidden)
            if of_weight is not None:
                put_product(pull.T, some, of_weight[columns], head.dtype)
        if of_hidden is not None:
            of_hidden = torch.zeros_like(hidden).index_copy_(0, active, of_hidden.to(hidden.dtype))
        return (
            of_hidden,
            of_weight,
            None if of_bias is None else of_bias.to(bias.dtype),
            *[None] * 4,
        )


def _add_columns(
    scores: Tensor, place: Tensor, peak: Tensor, total: Tensor, chosen: Tensor
) -> None:
    """Add some columns [R, C] to the partition sums of rows, `total` times exp of their `peak`.

    `chosen` takes the scores of the targets, which are at `place` [R, 1] where it is a column.
    """
    count = scores.shape[-1]
    found = scores.gather(-1, place.clamp(0, count - 1))
    chosen.copy_(torch.where((place >= 0) & (place < count), found, chosen))
    lowest = torch.finfo(scores.dtype).min  # all scores so far may be -inf
    highest = torch.maximum(peak, scores.amax(-1, keepdim=True)).clamp_min(lowest)
    added = (scores - highest).exp().sum(-1, keepdim=True)
    total.mul_((peak - highest).exp()).add_(added)
    peak.copy_(highest)


def _pull_of_columns(scores: Tensor, place: Tensor, log_z: Tensor, factor: Tensor) -> None:
    """Write the gradient by some scores over them; `factor` is that by the log-prob of each row."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    target = torch.where(columns == place, factor, 0)
    scores.sub_(log_z).exp_().mul_(-factor).add_(target)


# In a Function's forward, inputs appear to need gradients also under no_grad.
NO_GRADIENTS = (False, False, False)


class _LinearDivergence(torch.autograd.Function):
    """Sum over rows of a rule on two heads' scores; the forward computes its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor | None,
        teacher_bias: Tensor | None,
        temperature: Number,
        rule: Rule,
        block: int,
        grad: bool,
        caps: Caps,
    ) -> Tensor:
        heads = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
        ctx.save_for_backward(*heads)
        wanted = ctx.needs_input_grad[:3] if grad else NO_GRADIENTS
        ctx.rest = (temperature, rule, block, wanted, caps)
        total, ctx.gradients = _divergence(*heads, *ctx.rest)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Handed over and scaled in place, since a head's gradient is large; a second backward
        # through a retained graph computes it again.
        gradients = ctx.gradients or _divergence(*ctx.saved_tensors, *ctx.rest)[1]
        ctx.gradients = None
        found = [None if part is None else part.mul_(gradient) for part in gradients]
        return *found, *[None] * 8


def _divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    temperature: Number,
    rule: Rule,
    block: int,
    wanted: tuple[bool, ...],
    caps: Caps,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    dtype = sum_dtype(hidden)
    student = LinearHead(weight, bias, temperature, dtype, caps[0])
    gradients = HeadGradients(student, hidden, wanted)
    total = hidden.new_zeros((), dtype=dtype)
    rows = rows_per_block(len(weight), block)
    own_scores = gradients.scores(block, rows=rows)
    if teacher_weight is None:
        other_scores = given_scores(teacher_hidden, temperature, dtype, rows)
    else:
        teacher = LinearHead(teacher_weight, teacher_bias, temperature, dtype, caps[1])
        other_scores = teacher.scores(teacher_hidden, block, rows=rows)
    for (place, own), (_, others) in zip(own_scores, other_scores, strict=True):
        value, pull = rule(own, others, place, gradients.wanted)
        total += value
        if pull is not None:
            gradients.add(place, pull)
    return total, gradients.result()


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums: float32, or float64 for hidden states in it."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def check_linear(temperature: Number, block: int | None, *softcaps: Number | None) -> None:
    """Raise ValueError for a temperature, a block size or caps that no head can have."""
    check_temperature(temperature)
    for softcap in softcaps:
        if softcap is not None:
            check_positive("softcap", softcap, "leave it out for a head without a cap")
    if block is not None and block < 1:
        raise ValueError(f"block is {block} but must be >= 1: leave it out for the default")
