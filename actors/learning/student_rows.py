"""The student's rows of hinted turns, and how much likelier the hinted teacher makes right actions.

A right action is one that a sibling took in the same context, where the hinted rollout failed.

    advantage = log p_teacher(action | context, hint) - log p_student(action | context)

in nats, summed over the action's tokens at the temperature of the loss, before the step's update.
The action is drawn from the student's right ones. So with R the set of right actions in a context,
the expectation is

    log p_teacher(R) - log p_student(R) - KL(p_student(. | R) || p_teacher(. | R))

which is a lower bound of how much oftener the teacher is right, and equals it where only one action
is right. The failed action itself would not do: as it was drawn from the student, its expected
log-prob is lower under any other model, also under one that knows less.

Axes: N hinted response tokens, H hidden size, K entries of the top k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.hidden_states import HiddenStates, Rows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.teacher_outputs.messages import Head, TeacherOutput
from composer_mesh.channels.step import Figures
from composer_mesh.channels.weights import ADVANTAGE, WINS
from composer_mesh.losses.blocks import LinearHead, default_block
from composer_mesh.losses.fused import linear_logprobs
from composer_mesh.rollouts.alignment import HintedView


@dataclass
class StudentRows:
    """The student's hidden states for the `targets` [N] of some views, in their order.

    Of a context each rank has the states `hidden` [n, H] of some of these `rows`.
    """

    model: LanguageModel
    rows: Rows
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
    ) -> "StudentRows":
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
    """Return the advantage of each compared view, in float64, in their order."""
    rows, output = selected(rows, output, views, compared=True)
    own = _student(rows)
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
        replace(rows, rows=Rows.all(rows.hidden.index_select(0, own)), targets=rows.targets[own]),
        replace(output, tensors=tensors),
    )


def _student(rows: StudentRows) -> Tensor:
    """Return the student's log-probs [N] of the targets."""
    return _logprobs(rows.hidden.detach(), Head.of(rows.model), rows)


def _teacher(rows: StudentRows, output: TeacherOutput) -> Tensor:
    """Return the teacher's log-probs [N] of the targets, from any output but top k entries."""
    output = output.on(rows.hidden.device)
    tensors = output.tensors
    if "logprobs" in tensors:
        return tensors["logprobs"]
    if "logits" in tensors:
        normal = (tensors["logits"] / rows.temperature).log_softmax(-1)
        return normal.gather(-1, rows.targets.long().unsqueeze(-1)).squeeze(-1)
    return _logprobs(tensors["states"], output.head or Head.of(rows.model), rows)


def _logprobs(states: Tensor, head: Head, rows: StudentRows) -> Tensor:
    options: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap}
    return linear_logprobs(
        states, head.weight, rows.targets, temperature=rows.temperature, **options
    )
