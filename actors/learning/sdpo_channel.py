"""The SDPO channel of a step: distils teacher outputs into the student's rows of each view.

Chooses the loss that a kind of teacher output allows; the functions are in `losses`. Teacher
outputs come through a port: from an inline teacher, or a buffer that teachers of the mesh fill.

Axes: N hinted response tokens, H hidden size, K entries of the top k.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.update_pass import MicrobatchStates, TrainedChannel
from composer_mesh.actors.models.hidden_states import HiddenStates, SelectedRows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.teacher_outputs.messages import (
    TeacherHead,
    TeacherOutput,
    TeacherOutputsLost,
)
from composer_mesh.channels.step import Figures, unread
from composer_mesh.channels.weights import ADVANTAGE, WINS
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.losses.blocks import LinearHead, default_block
from composer_mesh.losses.distillation import (
    TaidSchedule,
    distillation_figures,
    entropy_gated_kl,
    generalized_jsd,
    sampled_reverse_kl,
    taid_loss,
    topk_distillation,
)
from composer_mesh.losses.fused import (
    linear_distillation,
    linear_jsd,
    linear_logprobs,
    linear_scores,
)
from composer_mesh.losses.reductions import normalized_sum
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.traces import TurnDivergences

ENTROPIES = ("sdpo/student_entropy", "sdpo/teacher_entropy")


class SdpoChannel(TrainedChannel):
    """Computes the configured distillation loss; holds TAID's interpolation schedule."""

    name = "sdpo"

    def __init__(self, config: SdpoConfig, steps: int) -> None:
        """`steps`: those of the whole run, over which TAID's target moves."""
        self._config, self._steps = config, steps
        self.taid = TaidSchedule()

    def term(self, states: MicrobatchStates, /) -> Tensor | None:
        """Return the loss of a microbatch's views; None without any, or if the output is lost.

        Adds their divergences to those of the pass.
        """
        one, place = states.one, states.one.first + states.index
        if one.source is None:
            return None
        if not states.microbatch.views:
            one.source.skip(place)
            return None
        views = [one.batch.views[view] for view in states.microbatch.views]
        places = {sample.trace_id: row for row, sample in enumerate(states.samples)}
        assert states.of_samples is not None
        rows = StudentRows.of(
            one.model,
            states.of_samples,
            [places[view.trace_id] for view in views],
            views,
            self._config.temperature,
        )
        output: TeacherOutput | None = None
        with suppress(TeacherOutputsLost):
            output = one.source.take(place, views, lambda: rows.top_k(self._config.top_k))
        if one.ranks.any_of_share(output is None) or output is None:
            one.source, one.lost = None, True
            return None
        if any(view.compared for view in views):
            compared = sum(view.compared for view in one.batch.views)
            note_advantages(rows, output, views, compared, one.sums.figures)
            rows, output = selected(rows, output, views, compared=False)
            views = [view for view in views if not view.compared]
            if not views:
                return None
        divergences = rows.hidden.new_empty(rows.rows.count, dtype=torch.float32)
        loss = self.loss(rows, output, one.counts.sdpo_tokens, one.sums.figures, divergences)
        one.divergences += by_turn(views, divergences)
        return loss

    def finish_step(self, loss: float | None, step: int, _ranks: Ranks, /) -> Figures:
        """Advance TAID's schedule after a step (0-based) with this loss; return its metrics."""
        if self._config.objective != "taid" or loss is None:
            return {}
        used = self.taid.t
        self.taid.update(loss, step, self._steps)
        return {"sdpo/taid_t": used}

    def loss(
        self,
        rows: StudentRows,
        teacher_output: TeacherOutput,
        normalizer: int,
        figures: dict[str, Any] | None = None,
        divergences: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the rows, divided by the number of hinted tokens in the batch.

        Adds the entropies of student and teacher to `figures` where the teacher output is a whole
        distribution. `divergences` [N] takes each row's divergence in nats, whatever the objective:
        `TurnDivergences` defines it.
        """
        seen = rows.hidden.new_empty(len(rows.hidden), dtype=torch.float32)
        loss = self._own_loss(rows, teacher_output, normalizer, figures, seen)
        if divergences is not None:
            divergences.copy_(rows.rows.whole(seen))
        return rows.rows.sum(loss)

    def _own_loss(
        self,
        rows: StudentRows,
        teacher_output: TeacherOutput,
        normalizer: int,
        figures: dict[str, Any] | None,
        divergences: Tensor,
    ) -> Tensor:
        """Return the loss of this rank's rows, whose divergences [n] it sets."""
        teacher_output = teacher_output.on(rows.hidden.device)
        for name, tensor in teacher_output.tensors.items():
            if len(tensor) != rows.rows.count:
                raise ValueError(
                    f"the signal's {name} have {len(tensor)} rows but the views have "
                    f"{rows.rows.count} tokens: build both from the same batch"
                )
        tensors = {name: rows.rows.own(one) for name, one in teacher_output.tensors.items()}
        if self._config.teacher_output == "sampled":
            return self._sampled(rows, tensors["logprobs"], normalizer, divergences)
        if self._config.teacher_output == "topk":
            top_k = tensors["ids"], tensors["logprobs"]
            return self._top_k(rows, *top_k, normalizer, divergences)
        if self._config.teacher_output == "full":
            teacher, head = tensors["logits"], None
        else:
            teacher = tensors["states"]
            head = teacher_output.head or TeacherHead.of(rows.model)
        entropies = rows.hidden.new_zeros(2, dtype=torch.float32)
        loss = self._whole(rows, teacher, head, normalizer, entropies, divergences)
        if figures is not None:
            for name, value in zip(ENTROPIES, rows.rows.sum(entropies), strict=True):
                figures[name] += unread(value)
        return loss

    def _whole(
        self,
        rows: StudentRows,
        teacher: Tensor,
        head: TeacherHead | None,
        normalizer: int,
        entropies: Tensor,
        divergences: Tensor,
    ) -> Tensor:
        """Return the loss on the teacher's whole distribution: states and head, or logits."""
        config, student = self._config, rows.model
        weight = None if head is None else head.weight
        options: dict[str, Any] = {
            "student_bias": student.bias,
            "teacher_bias": head.bias if head else None,
            "student_softcap": student.softcap,
            "teacher_softcap": head.softcap if head else None,
        }
        shared: dict[str, Any] = {"temperature": config.temperature, "normalizer": normalizer}
        if config.objective == "none":
            shared |= {"jsd_beta": config.jsd_beta, "entropies": entropies, **options}
            shared["divergences"] = divergences
            return linear_jsd(rows.hidden, student.weight, teacher, weight, **shared)

        def rows_loss(own: Tensor, others: Tensor, place: slice) -> Tensor:
            mask = torch.ones_like(own[:, 0], dtype=torch.bool)
            seen = distillation_figures(own, others, mask, **shared)
            entropies.add_(torch.stack([seen.student_entropy, seen.teacher_entropy]))
            divergences[place] = generalized_jsd(
                own.detach(),
                others,
                mask,
                jsd_beta=config.jsd_beta,
                temperature=config.temperature,
                reduction="none",
            )
            if config.objective == "taid":
                return taid_loss(own, others, mask, t=self.taid.t, **shared)
            return entropy_gated_kl(own, others, mask, h_max=config.entropy_opd_h_max, **shared)

        return linear_distillation(
            rows_loss, rows.hidden, student.weight, teacher, weight, **options
        )

    def _top_k(
        self,
        rows: StudentRows,
        ids: Tensor,
        teacher: Tensor,
        normalizer: int,
        divergences: Tensor,
    ) -> Tensor:
        def rows_loss(scores: Tensor, place: slice) -> Tensor:
            student = (scores / rows.temperature).log_softmax(-1).gather(-1, ids[place].long())
            by_row = topk_distillation(
                student,
                teacher[place],
                torch.ones_like(student[:, 0], dtype=torch.bool),
                jsd_beta=self._config.jsd_beta,
                reduction="none",
            )
            divergences[place] = by_row.detach()
            return normalized_sum(by_row, normalizer)

        model = rows.model
        return linear_scores(
            rows_loss, rows.hidden, model.weight, bias=model.bias, softcap=model.softcap
        )

    def _sampled(
        self, rows: StudentRows, teacher: Tensor, normalizer: int, divergences: Tensor
    ) -> Tensor:
        model = rows.model
        student = linear_logprobs(
            rows.hidden,
            model.weight,
            rows.rows.own(rows.targets),
            bias=model.bias,
            softcap=model.softcap,
            temperature=rows.temperature,
        )
        divergences.copy_(student.detach() - teacher)
        mask = torch.ones_like(student, dtype=torch.bool)
        return sampled_reverse_kl(student, teacher, mask, normalizer=normalizer)


def by_turn(views: Sequence[HintedView], divergences: Tensor) -> list[TurnDivergences]:
    """Split the divergences [N] of some views into those of each, in their order."""
    parts = divergences.cpu().split([len(view.targets) for view in views])
    return [
        TurnDivergences(view.trace_id, view.turn, array("f", part.tolist()))
        for view, part in zip(views, parts, strict=True)
    ]


@dataclass
class StudentRows:
    """The student's hidden states for the `targets` [N] of some views, in their order.

    Of a context each rank has the states `hidden` [n, H] of some of these `rows`.
    """

    model: LanguageModel
    rows: SelectedRows
    targets: Tensor
    temperature: float

    @property
    def hidden(self) -> Tensor:
        return self.rows.states

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        hidden: HiddenStates,
        rows: Sequence[int],
        views: Sequence[HintedView],
        temperature: float,
    ) -> StudentRows:
        """Select the rows of `views[i]` from sequence `rows[i]` of `hidden`, its trace."""
        places = [
            hidden.places_of(row, view.student_rows) for row, view in zip(rows, views, strict=True)
        ]
        targets = torch.tensor(
            [target for view in views for target in view.targets], device=hidden.computed.device
        )
        return cls(model, hidden.rows(torch.cat(places)), targets, temperature)

    @torch.no_grad()
    def top_k(self, top_k: int) -> Tensor:
        """Return the student's most likely ids [N, K]."""
        model = self.model
        head = LinearHead(model.weight, model.bias, 1.0, torch.float32, model.softcap)
        kept = min(top_k, len(model.weight))
        blocks = head.scores(self.hidden, default_block(self.hidden))
        own = [scores.topk(kept, dim=-1).indices.int() for _, scores in blocks]
        empty = self.targets.new_empty((0, kept), dtype=torch.int32)
        return self.rows.whole(torch.cat([empty, *own]))


def note_advantages(
    rows: StudentRows,
    output: TeacherOutput,
    views: Sequence[HintedView],
    count: int,
    figures: Figures,
) -> None:
    """Add the compared views' part of the means over all `count` of an update."""
    found = advantages(rows, output, views)
    figures[ADVANTAGE] += float(found.sum()) / count
    figures[WINS] += float((found > 0).sum()) / count


@torch.no_grad()
def advantages(rows: StudentRows, output: TeacherOutput, views: Sequence[HintedView]) -> Tensor:
    """Return the advantage of each compared view, in float64, in their order.

    It says how much likelier the hinted teacher makes right actions: those that a sibling took in
    the same context, where the hinted rollout failed.

        advantage = log p_teacher(action | context, hint) - log p_student(action | context)

    in nats, summed over the action's tokens at the temperature of the loss, before the step's
    update. The action is drawn from the student's right ones. So with R the set of right actions
    in a context, the expectation is

        log p_teacher(R) - log p_student(R) - KL(p_student(. | R) || p_teacher(. | R))

    which is a lower bound of how much oftener the teacher is right, and equals it where only one
    action is right. The failed action itself would not do: as it was drawn from the student, its
    expected log-prob is lower under any other model, also under one that knows less.
    """
    rows, output = selected(rows, output, views, compared=True)
    own = _logprobs(rows.hidden.detach(), TeacherHead.of(rows.model), rows)
    differences = (_teacher(rows, output) - own).double().cpu()
    sizes = [len(view.targets) for view in views if view.compared]
    return torch.stack([part.sum() for part in differences.split(sizes)])


def selected(
    rows: StudentRows, output: TeacherOutput, views: Sequence[HintedView], *, compared: bool
) -> tuple[StudentRows, TeacherOutput]:
    """Return the rows of the views that are compared, or of those that are trained."""
    kept = [view.compared == compared for view in views for _ in view.targets]
    places = torch.tensor(kept).nonzero().squeeze(-1)
    own, device = places.to(rows.hidden.device), next(iter(output.tensors.values())).device
    tensors = {name: one[places.to(device)] for name, one in output.tensors.items()}
    return (
        replace(
            rows, rows=SelectedRows.all(rows.hidden.index_select(0, own)), targets=rows.targets[own]
        ),
        replace(output, tensors=tensors),
    )


def _teacher(rows: StudentRows, output: TeacherOutput) -> Tensor:
    """Return the teacher's log-probs [N] of the targets, from any output but top k entries."""
    output = output.on(rows.hidden.device)
    tensors = output.tensors
    if "logprobs" in tensors:
        return tensors["logprobs"]
    if "logits" in tensors:
        normal = (tensors["logits"] / rows.temperature).log_softmax(-1)
        return normal.gather(-1, rows.targets.long().unsqueeze(-1)).squeeze(-1)
    return _logprobs(tensors["states"], output.head or TeacherHead.of(rows.model), rows)


def _logprobs(states: Tensor, head: TeacherHead, rows: StudentRows) -> Tensor:
    options: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap}
    return linear_logprobs(
        states, head.weight, rows.targets, temperature=rows.temperature, **options
    )
