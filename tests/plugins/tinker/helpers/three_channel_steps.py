"""A batch of the trainer as the step that a client sends, with the same teacher for both."""

from itertools import pairwise
from typing import Any

import torch
from step_batches import ALL_ON, own_logprobs

from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.plugins.tinker.client.sequences import (
    Hinted,
    Pair,
    Rollout,
    TeacherTopK,
    ThreeChannelStep,
    Turn,
)
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PolicySample, StepBatch

K = 6
ON: Any = {**ALL_ON, "sdpo": {"alpha": 0.5, "teacher_output": "topk", "top_k": K}}


def rollout_of(sample: PolicySample) -> Rollout:
    """Return a sample as a client has it: its turns are its runs of trained ids."""
    starts = [n for n, (a, b) in enumerate(pairwise([False, *sample.mask])) if b and not a]
    ends = [n for n, (a, b) in enumerate(pairwise([*sample.mask, False])) if a and not b]
    ends = [one + 1 for one in ends]
    turns, at = [], 0
    for start, end in zip(starts, ends, strict=True):
        own = slice(start, end)
        turns.append(Turn(sample.ids[at:start], sample.ids[own], sample.logprobs[own]))
        at = end
    assert isinstance(sample.advantage, float)
    return Rollout(turns, sample.advantage)


class TopKTeacher:
    """A source of a teacher's most probable ids, for the trainer and for the client."""

    def __init__(self, model: Any, views: list[HintedView]) -> None:
        self._rows = {}
        for view in views:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([view.teacher_ids])).logits[0]
            top = logits[view.teacher_rows].log_softmax(-1).topk(K)
            self._rows[view.trace_id, view.turn] = (top.indices, top.values)

    def of(self, view: HintedView) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows[view.trace_id, view.turn]

    def take(self, _microbatch: int, views: Any, _choose: Any, /) -> TeacherOutput:
        ids, logprobs = zip(*(self.of(view) for view in views), strict=True)
        return TeacherOutput({"ids": torch.cat(ids), "logprobs": torch.cat(logprobs)})

    def skip(self, _microbatch: int, /) -> None: ...


def client_step(batch: StepBatch, teacher: TopKTeacher, reference: Any) -> ThreeChannelStep:
    """Return the step that a client would send for a batch of the trainer."""
    rollouts = {sample.trace_id: rollout_of(sample) for sample in batch.samples}
    hinted = []
    for view in batch.views:
        ids, logprobs = teacher.of(view)
        found = TeacherTopK(ids.numpy(), logprobs.numpy())
        hinted.append(Hinted(rollouts[view.trace_id], view, found))
    pairs = []
    for one in batch.pairs:
        sides = []
        for answer in (one.chosen_ids, one.rejected_ids):
            with torch.no_grad():
                logprobs = own_logprobs(reference, one.context_ids + answer)
            sides.append(logprobs[-len(answer) :].tolist())
        pairs.append(Pair(one.context_ids, one.chosen_ids, one.rejected_ids, *sides))
    return ThreeChannelStep(
        list(rollouts.values()), hinted, pairs, alpha=0.5, beta=0.3, dpo_beta=0.1
    )
