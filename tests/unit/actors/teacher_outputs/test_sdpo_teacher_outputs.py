"""Losses by signal: hidden and full agree, topk comes to them as k grows, sampled is its own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from repetition import repeated
from step_batches import (
    NARROW,
    GivenStates,
    Make,
    assert_gradients_are,
    batch_of,
    flat,
    gradients_of,
    largest_change,
    nearby,
    weights_of,
)
from torch import Tensor

from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.actors.teacher_outputs.sources import InlineSource, TeacherOutputsLost
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.rollouts.batches import StepBatch

ALPHA = 0.5
LOOSE = {"grad_clip": 1e9, "lr": 1e-3}
TEMPERATURE = 1.3
WHOLE = 100_000
"""More entries than the vocabulary has."""


class Trained:
    """A step with an inline teacher of the configured signal: its loss and its gradients."""

    def __init__(self, make: Make, seed: int = 0, trainer: Any = LOOSE, **sdpo: Any) -> None:
        sections = {"alpha": ALPHA, "placement": "inline", **sdpo}
        self.model, self.step = make(2, **NARROW, sdpo=sections, trainer=trainer)
        self.config = self.step._config.sdpo
        self.batch = flat(batch_of(self.model, random.Random(seed)))
        nearby(self.model, seed=1)  # the student has moved on from what the teacher is
        self.metrics = self.step.run(self.batch, self.source(make))
        self.loss: float = self.metrics["loss/sdpo"] or 0.0
        self.gradients = [weights.grad for weights in self.model.parameters()]

    def source(self, make: Make) -> InlineSource:
        budget = self.step._config.trainer.microbatch_tokens
        teacher = TeacherModel(make(2)[0], self.config, budget, follows=True)
        return InlineSource(teacher, self.config, 0)


def distance(one: Trained, two: Trained) -> float:
    """Between gradients, as a share of their size."""
    a = torch.cat([part.flatten() for part in one.gradients if part is not None])
    b = torch.cat([part.flatten() for part in two.gradients if part is not None])
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("teacher", ["live", "ema", "frozen", "trust_region"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.7, "jsd_beta": 0.2},
        {"objective": "taid"},
        {"objective": "entropy_opd"},
    ],
    ids=["jsd", "tempered", "taid", "entropy_opd"],
)
def test_hidden_and_full_have_the_same_loss_and_gradients(
    make: Make, settings: dict[str, Any], teacher: str
) -> None:
    hidden, full = (
        Trained(make, teacher_output=teacher_output, teacher=teacher, **settings)
        for teacher_output in ("hidden", "full")
    )
    assert hidden.loss > 1e-4
    assert hidden.loss == pytest.approx(full.loss, rel=1e-5)
    assert distance(hidden, full) < 1e-5


@pytest.mark.parametrize("choice", ["teacher", "student"])
@pytest.mark.parametrize("beta", repeated([0.5, 0.0, 1.0]))
def test_topk_comes_to_the_exact_loss_as_k_grows(make: Make, choice: str, beta: float) -> None:
    exact = Trained(make, teacher_output="hidden", jsd_beta=beta)
    found = [
        Trained(make, teacher_output="topk", top_k=k, top_k_choice=choice, jsd_beta=beta)
        for k in (1, 16, 128, WHOLE)
    ]
    errors = [abs(one.loss - exact.loss) / exact.loss for one in found]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5
    distances = [distance(one, exact) for one in found]
    assert distances[0] > distances[2] > distances[3]
    assert distances[3] < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_topk_of_the_whole_vocabulary_is_the_full_signal(make: Make, temperature: float) -> None:
    sdpo = {"temperature": temperature, "jsd_beta": 0.5}
    whole = Trained(make, teacher_output="topk", top_k=WHOLE, **sdpo)
    full = Trained(make, teacher_output="full", **sdpo)
    assert whole.loss == pytest.approx(full.loss, rel=1e-5)
    assert distance(whole, full) < 1e-5


def test_a_topk_loss_never_exceeds_the_whole_one(make: Make) -> None:
    """A tail in one bucket can only hide differences."""
    exact = Trained(make, teacher_output="hidden").loss
    for k in (1, 8, 64):
        assert Trained(make, teacher_output="topk", top_k=k).loss <= exact * (1 + 1e-5)


def log_probs(model: Any, ids: list[int], rows: list[int], targets: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, rows]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0]


def test_sampled_is_reinforce_towards_the_teachers_log_probs(make: Make) -> None:
    found = Trained(make, teacher_output="sampled", temperature=TEMPERATURE)
    student, teacher = nearby(make(2)[0], seed=1), make(2)[0]
    ids = {sample.trace_id: sample.ids for sample in found.batch.samples}
    expected = torch.zeros(())
    for view in found.batch.views:
        own = log_probs(student, ids[view.trace_id], view.student_rows, view.targets)
        others = log_probs(teacher, view.teacher_ids, view.teacher_rows, view.targets)
        expected = expected - ((others - own).detach() * own).sum() / found.batch.sdpo_tokens
    assert found.loss == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients_are(gradients_of(ALPHA * expected, student), found.model)


@pytest.mark.parametrize("teacher_output", ["hidden", "topk", "full", "sampled"])
def test_how_a_step_is_split_changes_no_signals_loss(make: Make, teacher_output: str) -> None:
    one, many = (
        Trained(make, teacher_output=teacher_output, trainer={**LOOSE, "microbatch_tokens": budget})
        for budget in (10_000, 64)
    )
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert_gradients_are([part for part in one.gradients if part is not None], many.model)


class LosesSome:
    """A source that gives up at its second microbatch."""

    def __init__(self, batch: StepBatch, states: Tensor) -> None:
        self._given, self._taken = GivenStates(batch, states), 0

    def take(self, *asked: Any) -> TeacherOutput:
        self._taken += 1
        if self._taken > 1:
            raise TeacherOutputsLost("the teacher died")
        return self._given.take(*asked)


def test_a_step_whose_signals_are_lost_is_the_step_without_the_channel(make: Make) -> None:
    sections = {**NARROW, "trainer": {**LOOSE, "microbatch_tokens": 64}}
    model, step = make(2, **sections, sdpo={"alpha": ALPHA})
    other, plain = make(2, **sections)
    batch = batch_of(model, random.Random(0))
    states = torch.ones(batch.sdpo_tokens, model.config.hidden_size)
    found = step.run(batch, LosesSome(batch, states))
    expected = plain.run(replace(batch, views=[]), None)
    assert (found.pop("sdpo/lost_steps"), found.pop("sdpo/alpha")) == (1, ALPHA)
    assert found["loss/sdpo"] is None
    assert found == expected
    assert largest_change(weights_of(model), weights_of(other)) == 0


class AnotherRankLost(Ranks):
    """This process's view when the signals of another rank did not come."""

    def any(self, flag: bool) -> bool:
        return True


def test_what_another_rank_lost_is_lost_for_all(make: Make) -> None:
    model, plain = make(2, sdpo={"alpha": ALPHA})
    step = ThreeChannelStep(model, None, plain._config, AnotherRankLost())
    batch = batch_of(model, random.Random(0))
    states = torch.ones(batch.sdpo_tokens, model.config.hidden_size)
    metrics = step.run(batch, GivenStates(batch, states))
    assert metrics["sdpo/lost_steps"] == 1
    assert metrics["loss/sdpo"] is None
