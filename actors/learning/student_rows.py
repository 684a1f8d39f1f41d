"""The student's side of a distillation: its hidden states at the tokens of some views.

Axes: N hinted response tokens, H hidden size, K entries of the top k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_mesh.actors.models.hidden_states import HiddenStates, Rows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.losses.blocks import LinearHead, default_block
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
