"""Batches for the trainer's step, sampled from a tiny model, and what a step did to its weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput, view_keys
from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.channels.policy import policy_sample
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.rollouts.alignment import HintedView, hinted_view
from composer_mesh.rollouts.batches import PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.traces import Trace, Turn

PROMPT, HINT = [7, 8], [11, 12, 13]
TEACHERS = [{"name": "a", "kind": "builtin"}, {"name": "b", "kind": "builtin"}]
ALL_ON: dict[str, dict[str, Any]] = {
    "sdpo": {"alpha": 0.5},
    "replay": {"beta": 0.3, "ask": 2, "teachers": TEACHERS},
}
NARROW: dict[str, dict[str, Any]] = {
    "policy": {"max_context": 64},
    "environment": {"max_turns": 2},
    "generator": {"max_new_tokens": 10},
}
"""Sections that let a microbatch be as small as 64 tokens, the longest trace of a batch."""

Weights = dict[str, Tensor]
Make = Callable[..., tuple[Any, OptimizerStep]]


def ids_of(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(300) for _ in range(rng.randint(1, longest))]


def own_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [T - 1] of each next id, from the model's own whole logits."""
    row = torch.tensor([ids])
    return token_logprobs(model(input_ids=row).logits[:, :-1], row[:, 1:], temperature)[0]


def sampled_trace(model: Any, rng: random.Random, name: str, noise: float = 0.3) -> Trace:
    """Turns whose log-probs are the model's own, give or take what a stale policy would differ."""
    parts = [([*ids_of(rng, 9), *PROMPT], ids_of(rng, 7)) for _ in range(rng.randint(1, 3))]
    with torch.no_grad():
        logprobs = own_logprobs(model, [i for part in parts for ids in part for i in ids]).tolist()
    turns, at = [], 0
    for context, action in parts:
        at += len(context)
        own = [logprobs[at - 1 + k] + rng.uniform(-noise, noise) for k in range(len(action))]
        turns.append(Turn(context, action, own, [0] * len(action), "stop"))
        at += len(action)
    return Trace(name, 0, 0, "toolbox", "train", 0, turns, [], 0.0, False, [])


def batch_of(
    model: Any, rng: random.Random, *, samples: int = 6, pairs: int = 0, noise: float = 0.3
) -> StepBatch:
    traces = [sampled_trace(model, rng, f"t{n}", noise) for n in range(samples)]
    views = [
        hinted_view(trace, turn, HINT[: rng.randint(0, 3)], PROMPT)
        for trace in reversed(traces[1:])
        for turn in range(len(trace.turns))
    ]
    return StepBatch(
        0,
        [policy_sample(trace, rng.uniform(-1, 1)) for trace in traces],
        views,
        [sampled_pair(model, rng, f"p{n}") for n in range(pairs)],
    )


def sampled_pair(model: Any, rng: random.Random, name: str) -> PairSample:
    """A pair whose reference is the model as it is now."""
    return referred(model, PairSample(name, ids_of(rng, 9), ids_of(rng, 6), ids_of(rng, 6)))


def referred(model: Any, pair: PairSample) -> PairSample:
    """The pair with the model, as it is now, for its reference."""
    context, answers = pair.context_ids, (pair.chosen_ids, pair.rejected_ids)
    with torch.no_grad():
        chosen, rejected = (
            own_logprobs(model, context + ids)[-len(ids) :].sum() for ids in answers
        )
    return replace(pair, reference=(float(chosen), float(rejected)))


def begun_with(batch: StepBatch, *prompts: list[int]) -> StepBatch:
    """The batch with a prompt before all ids, in turn: samples, views and pairs share it."""
    places = {sample.trace_id: n for n, sample in enumerate(batch.samples)}

    def prompt(place: int) -> list[int]:
        return prompts[place % len(prompts)]

    def sample(one: PolicySample, before: list[int]) -> PolicySample:
        count = len(before)
        return replace(
            one,
            ids=before + one.ids,
            mask=[False] * count + one.mask,
            logprobs=[0.0] * count + one.logprobs,
            versions=[-1] * count + one.versions,
        )

    def pair(one: PairSample, before: list[int]) -> PairSample:
        return replace(one, context_ids=before + one.context_ids, reference=(-20.0, -10.0))

    def view(one: Any, before: list[int]) -> Any:
        rows = {
            name: [row + len(before) for row in getattr(one, name)]
            for name in ("student_rows", "teacher_rows")
        }
        return replace(one, teacher_ids=before + one.teacher_ids, **rows)

    return replace(
        batch,
        samples=[sample(one, prompt(n)) for n, one in enumerate(batch.samples)],
        views=[view(one, prompt(places[one.trace_id])) for one in batch.views],
        pairs=[pair(one, prompt(n)) for n, one in enumerate(batch.pairs)],
    )


def flat(batch: StepBatch) -> StepBatch:
    """The batch without anything to learn from rewards."""
    return replace(batch, samples=[replace(sample, advantage=0.0) for sample in batch.samples])


def taught(step: OptimizerStep, teacher: Any, batch: StepBatch) -> dict[str, float | None]:
    """A step with the signal of a teacher, given as a model: the student's own or another."""
    return step.run(batch, GivenStates(batch, hinted_states(teacher, batch.views, 4096)))


class GivenStates:
    """A source of signals that were made before: hidden states [N, H] for a batch's views."""

    def __init__(self, batch: StepBatch, states: Tensor) -> None:
        ends = accumulate(len(view.targets) for view in batch.views)
        keys = view_keys(batch.views)
        self._rows = {
            key: states[end - len(view.targets) : end]
            for key, view, end in zip(keys, batch.views, ends, strict=True)
        }

    def take(self, _microbatch: int, views: Sequence[HintedView], _choose: Any, /) -> TeacherOutput:
        return TeacherOutput({"states": torch.cat([self._rows[key] for key in view_keys(views)])})

    def skip(self, _microbatch: int, /) -> None: ...


def weights_of(model: Any) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def largest_change(one: Weights, two: Weights) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def nearby(model: Any, seed: int = 0) -> Any:
    """The model's weights, moved a little in place: a policy of some steps ago."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.01 * torch.randn(weights.shape, generator=generator)
    return model


def gradients_of(loss: Tensor, model: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_gradients_are(expected: list[Tensor], model: Any, *, rtol: float = 1e-3) -> None:
    """That a step left these gradients on the model, up to float32 sums in another order."""
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for weights, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weights.grad, gradient, rtol=rtol, atol=1e-5 * largest)
