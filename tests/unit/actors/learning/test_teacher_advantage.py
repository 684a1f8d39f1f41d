"""The hinted teacher's advantage at right actions: what it is, that it trains nothing, the gate."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import (
    NARROW,
    Make,
    batch_of,
    largest_change,
    own_logprobs,
    taught,
    weights_of,
)

from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.channels.weights import ADVANTAGE, RATE, WINS, ChannelWeights, RunningMeans
from composer_mesh.rollouts.batches import StepBatch

TEMPERATURE = 1.3
MEASURED = {"alpha": 0.5, "advantage_sites": 8, "temperature": TEMPERATURE}


def compared_batch(model: Any, rng: random.Random) -> tuple[StepBatch, StepBatch]:
    """A batch of which every other view is compared, and the same batch without these."""
    batch = batch_of(model, rng, samples=6)
    kept = [view for view in batch.views if view.targets]
    views = [replace(view, compared=bool(n % 2)) for n, view in enumerate(kept)]
    assert sum(view.compared for view in views) > 2
    return replace(batch, views=views), replace(batch, views=views[::2])


def expected_advantages(student: Any, teacher: Any, batch: StepBatch) -> list[float]:
    """From whole logits, which the step never makes."""
    ids = {sample.trace_id: sample.ids for sample in batch.samples}
    found = []
    with torch.no_grad():
        for view in batch.views:
            if view.compared:
                own = own_logprobs(student, ids[view.trace_id], TEMPERATURE)[view.student_rows]
                other = own_logprobs(teacher, view.teacher_ids, TEMPERATURE)[view.teacher_rows]
                found.append(float(other.sum() - own.sum()))
    return found


@pytest.mark.parametrize("teacher_output", ["hidden", "full", "sampled"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_the_advantage_is_the_mean_difference_of_log_probs_of_right_actions(
    make: Make, rng: random.Random, teacher_output: str, budget: int
) -> None:
    sdpo = {**MEASURED, "teacher_output": teacher_output, "placement": "inline"}
    trainer = {"microbatch_tokens": budget, "lr": 1e-3}
    model, step = make(2, **NARROW, sdpo={**sdpo, "teacher": "frozen"}, trainer=trainer)
    teacher, config = make(3)[0], step._config.sdpo
    batch, _ = compared_batch(model, rng)
    expected = expected_advantages(model, teacher, batch)
    other = TeacherModel(model, config, budget, follows=True, copied=lambda _: teacher)
    found = step.run(batch, InlineSource(other, config, 0))
    assert found[ADVANTAGE] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    wins = sum(value > 0 for value in expected) / len(expected)
    assert found[WINS] == pytest.approx(wins)


def test_compared_views_train_nothing(make: Make, rng: random.Random) -> None:
    model, step = make(2, sdpo=MEASURED)
    plain_model, plain = make(2, sdpo=MEASURED)
    batch, without = compared_batch(model, rng)
    teacher = make(3)[0]
    found, expected = taught(step, teacher, batch), taught(plain, teacher, without)
    known = {name: value for name, value in expected.items() if value is not None}
    assert {name: found[name] for name in known} == pytest.approx(known, rel=1e-5)
    assert largest_change(weights_of(plain_model), weights_of(model)) < 1e-5
    assert found.keys() - expected.keys() == {ADVANTAGE, WINS}
    assert {(one.trace_id, one.turn) for one in step.divergences} == {
        (view.trace_id, view.turn) for view in without.views
    }


def test_a_batch_with_nothing_to_distil_still_compares(make: Make, rng: random.Random) -> None:
    model, step = make(2, sdpo=MEASURED)
    batch, _ = compared_batch(model, rng)
    only = replace(batch, views=[view for view in batch.views if view.compared])
    found = taught(step, make(3)[0], only)
    assert found["loss/sdpo"] is None
    assert found[ADVANTAGE] is not None


def test_a_teacher_that_is_less_often_right_turns_the_channel_off(
    make: Make, rng: random.Random
) -> None:
    sdpo = {**MEASURED, "min_advantage": 0.0}
    model, step = make(2, sdpo=sdpo, trainer={"lr": 1e-9})
    batch, _ = compared_batch(model, rng)
    bad = make(3)[0]
    first = taught(step, bad, batch)
    assert first[ADVANTAGE] is not None
    assert first[ADVANTAGE] < 0
    assert (first["sdpo/gate"], first["sdpo/alpha"]) == (1, 0.5)
    second = taught(step, bad, replace(batch, step=1))
    assert (second["sdpo/gate"], second["sdpo/alpha"], second["loss/sdpo"]) == (0, 0, None)
    assert second["running/advantage"] == pytest.approx(first[ADVANTAGE])
    assert second[ADVANTAGE] is not None


def weights_for(build_config: Any, **sections: Any) -> ChannelWeights:
    return ChannelWeights(build_config(**sections))


def test_a_gate_is_open_without_a_measurement_and_follows_the_running_mean(
    build_config: Any,
) -> None:
    weights = weights_for(build_config, sdpo={**MEASURED, "min_advantage": 0.1})
    empty = StepBatch(0, [], [], [])
    assert weights.of(0)["sdpo"] == 0.5
    weights.finish_step(empty, {})
    assert weights.of(1)["sdpo"] == 0.5
    weights.finish_step(empty, {ADVANTAGE: -1.0})
    assert weights.of(2)["sdpo"] == 0
    steps = 2
    while weights.of(steps)["sdpo"] == 0:
        weights.finish_step(empty, {ADVANTAGE: 1.0})
        steps += 1
    assert steps == 4, "-1 and two times 1, weighted 0.081, 0.09 and 0.1"


def test_a_weight_falls_with_what_it_follows(build_config: Any) -> None:
    schedule = {"decay": "linear", "by": "success", "start": 0.2, "end": 0.6, "min_ratio": 0.5}
    weights = weights_for(build_config, sdpo={"alpha": 1.0, "alpha_schedule": schedule})
    assert weights.of(3)["sdpo"] == 1.0
    batch = StepBatch(0, [], [], [], success=0.4)
    assert weights.finish_step(batch, {}) == {}
    assert weights.of(3)["sdpo"] == pytest.approx(0.75)
    for _ in range(200):
        found = weights.finish_step(replace(batch, success=0.9), {})
    assert found == {"running/success": pytest.approx(0.9)}
    assert weights.of(3)["sdpo"] == 0.5


def test_running_means_are_corrected_for_their_beginning_and_survive_a_checkpoint() -> None:
    means = RunningMeans()
    assert means["success"] is None
    means.note({"success": 0.5, "agreement": None})
    assert means["success"] == pytest.approx(0.5)
    assert means["agreement"] is None
    means.note({"success": 1.0})
    assert means["success"] == pytest.approx((0.5 * (1 - RATE) + 1.0) / (2 - RATE))
    again = RunningMeans()
    again.load_state_dict(means.state_dict())
    assert again["success"] == means["success"]


def test_a_gate_on_wins_counts_how_often_and_not_how_much(build_config: Any) -> None:
    weights = weights_for(build_config, sdpo={**MEASURED, "min_advantage_wins": 0.5})
    empty = StepBatch(0, [], [], [])
    weights.finish_step(empty, {ADVANTAGE: -50.0, WINS: 0.8})
    assert weights.of(1)["sdpo"] == 0.5
    assert weights.finish_step(empty, {ADVANTAGE: 3.0, WINS: 0.1}) == {
        "running/advantage_wins": pytest.approx(0.8),
        "sdpo/gate": 1.0,
    }
    assert weights.of(2)["sdpo"] == 0
