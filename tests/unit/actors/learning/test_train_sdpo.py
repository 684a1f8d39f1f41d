"""The SDPO channel: each objective is its function on whole logits, which the step never makes.

The hinted teacher's advantage at right actions: what it is, that it trains nothing, the gate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from repetition import repeated
from step_batches import (
    ALL_ON,
    NARROW,
    Make,
    assert_gradients_are,
    batch_of,
    flat,
    gradients_of,
    largest_change,
    own_logprobs,
    taught,
    weights_of,
)
from torch import Tensor
from torch.distributions import Categorical

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.channels.policy import policy_sample
from composer_mesh.channels.weights import ADVANTAGE, RATE, WINS, ChannelWeights, RunningMeans
from composer_mesh.losses.blocks import CPU_BLOCK
from composer_mesh.losses.distillation import (
    TaidSchedule,
    entropy_gated_kl,
    generalized_jsd,
    taid_loss,
)
from composer_mesh.rollouts.alignment import hinted_view
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.traces import Trace, Turn

ALPHA = 0.5


LOOSE = {"grad_clip": 1e9}


Divergence = Callable[..., Tensor]


def jsd(beta: float) -> Divergence:
    return lambda s, t, mask, **shared: generalized_jsd(s, t, mask, jsd_beta=beta, **shared)


def taid(t: float) -> Divergence:
    return lambda s, p, mask, **shared: taid_loss(s, p, mask, t=t, **shared)


def gated(h_max: float | None) -> Divergence:
    return lambda s, t, mask, **shared: entropy_gated_kl(s, t, mask, h_max=h_max, **shared)


CASES: dict[str, tuple[dict[str, Any], Divergence]] = {
    "forward": ({"jsd_beta": 0.0}, jsd(0.0)),
    "half": ({}, jsd(0.5)),
    "mixed": ({"jsd_beta": 0.3, "temperature": 1.7}, jsd(0.3)),
    "reverse": ({"jsd_beta": 1.0, "temperature": 0.8}, jsd(1.0)),
    "taid": ({"objective": "taid", "temperature": 1.7}, taid(0.4)),
    "entropy_opd": ({"objective": "entropy_opd", "temperature": 1.7}, gated(None)),
    "entropy_opd narrow": ({"objective": "entropy_opd", "entropy_opd_h_max": 2.0}, gated(2.0)),
}


def whole_rows(model: Any, batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of student and teacher for the batch's hinted tokens, from whole forwards."""
    ids = {sample.trace_id: sample.ids for sample in batch.samples}
    student, teacher = [], []
    for view in batch.views:
        student.append(logits(model, ids[view.trace_id])[view.student_rows])
        teacher.append(logits(model, view.teacher_ids)[view.teacher_rows])
    return torch.cat(student), torch.cat(teacher)


def logits(model: Any, ids: list[int]) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return found


def expected_loss(
    model: Any, batch: StepBatch, function: Divergence, temperature: float = 1.0
) -> Tensor:
    student, teacher = whole_rows(model, batch)
    mask = torch.ones(len(student), dtype=torch.bool)
    return function(student, teacher, mask, temperature=temperature, normalizer=len(student))


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_loss_and_gradients_of_its_divergence_on_whole_logits(
    make: Make, rng: random.Random, name: str
) -> None:
    section, function = CASES[name]
    model, step = make(sdpo={"alpha": ALPHA, **section}, trainer=LOOSE)
    batch = flat(batch_of(model, rng))
    expected = expected_loss(model, batch, function, section.get("temperature", 1.0))
    assert expected.item() > 1e-3
    gradients = gradients_of(ALPHA * expected, model)
    sides = (rows / section.get("temperature", 1.0) for rows in whole_rows(model, batch))
    student, teacher = (Categorical(logits=rows).entropy().mean().item() for rows in sides)
    metrics = taught(step, model, batch)
    assert metrics["sdpo/student_entropy"] == pytest.approx(student, rel=1e-4)
    assert metrics["sdpo/teacher_entropy"] == pytest.approx(teacher, rel=1e-4)
    assert metrics["loss/sdpo"] == pytest.approx(expected.item(), rel=1e-4)
    assert ("sdpo/taid_t" in metrics) == (name == "taid")
    assert metrics["loss/total"] == pytest.approx(ALPHA * expected.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", repeated([64, 10_000]))
def test_a_step_tells_the_divergence_of_each_hinted_token(
    make: Make, rng: random.Random, name: str, budget: int
) -> None:
    section, _ = CASES[name]
    sections = {**NARROW, "sdpo": {"alpha": ALPHA, **section}}
    model, step = make(**sections, trainer={**LOOSE, "microbatch_tokens": budget})
    batch = batch_of(model, rng)
    student, teacher = whole_rows(model, batch)
    expected = generalized_jsd(
        student,
        teacher,
        torch.ones(len(student), dtype=torch.bool),
        jsd_beta=section.get("jsd_beta", 0.5),
        temperature=section.get("temperature", 1.0),
        reduction="none",
    )
    parts = expected.detach().split([len(view.targets) for view in batch.views])
    taught(step, model, batch)
    found = {(one.trace_id, one.turn): one.values for one in step.divergences}
    assert len(found) == len(step.divergences) == len(batch.views)
    for view, divergences in zip(batch.views, parts, strict=True):
        own = torch.tensor(found[view.trace_id, view.turn])
        torch.testing.assert_close(own, divergences, rtol=1e-3, atol=1e-6)


def test_later_epochs_do_not_replace_the_divergences_of_the_first(
    make: Make, rng: random.Random
) -> None:
    shared = {"sdpo": {"alpha": ALPHA}}
    model, once = make(**shared, trainer={**LOOSE, "lr": 1e-2})
    other, twice = make(**shared, trainer={**LOOSE, "lr": 1e-2, "epochs": 2})
    batch = batch_of(model, rng)
    taught(once, model, batch)
    taught(twice, other, batch)
    assert twice.divergences == once.divergences


@pytest.mark.parametrize("objective", ["none", "taid", "entropy_opd"])
def test_how_a_step_is_split_changes_neither_its_loss_nor_its_gradients(
    make: Make, rng: random.Random, objective: str
) -> None:
    sections = {**NARROW, "sdpo": {"alpha": ALPHA, "objective": objective, "temperature": 1.3}}
    model, whole = make(**sections, trainer={**LOOSE, "microbatch_tokens": 10_000})
    other, split = make(**sections, trainer={**LOOSE, "microbatch_tokens": 64})
    batch = batch_of(model, rng)
    metrics = [taught(step, policy, batch) for policy, step in ((model, whole), (other, split))]
    assert metrics[1]["loss/sdpo"] == pytest.approx(metrics[0]["loss/sdpo"], rel=1e-5)
    assert_gradients_are([weights.grad for weights in model.parameters()], other)


def test_taid_trains_with_the_position_before_the_update_and_then_moves_it(
    make: Make, rng: random.Random
) -> None:
    steps = 6
    sections = {
        "run": {"name": "unit", "seed": 3, "steps": steps},
        "sdpo": {"alpha": ALPHA, "objective": "taid"},
    }
    model, step = make(**sections, trainer={"lr": 1e-3})
    schedule, used = TaidSchedule(), []
    for number in range(steps):
        batch = replace(flat(batch_of(model, rng)), step=number)
        loss = expected_loss(model, batch, taid(schedule.t)).item()
        metrics = taught(step, model, batch)
        assert metrics["sdpo/taid_t"] == pytest.approx(schedule.t, abs=1e-6)
        assert metrics["loss/sdpo"] == pytest.approx(loss, rel=1e-4)
        used.append(metrics["sdpo/taid_t"])
        schedule.update(loss, number, steps)
    assert used[:2] == [0.4, 0.4]
    assert used == sorted(used)
    assert used[-1] == pytest.approx(0.4 + 0.6 * (steps - 2) / steps)


def test_a_step_without_views_leaves_taid_where_it_is(make: Make, rng: random.Random) -> None:
    model, step = make(sdpo={"alpha": ALPHA, "objective": "taid"})
    batch = batch_of(model, rng)
    taught(step, model, batch)
    metrics = step.run(replace(batch, views=[], step=1), None)
    assert "sdpo/taid_t" not in metrics
    assert taught(step, model, replace(batch, step=2))["sdpo/taid_t"] == 0.4


VOCABULARY, ROWS, LENGTH = 20_000, 700, 100


def wide_model() -> Any:
    """Almost nothing but a vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **sizes,
        **heads,
    )
    return Qwen3ForCausalLM(config).eval()


def long_batch(rng: random.Random) -> StepBatch:
    """As many sampled tokens, hinted tokens and answer tokens, each in one microbatch."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    traces = []
    for number in range(ROWS // LENGTH):
        turn = Turn(ids(5), ids(LENGTH), [-9.0] * LENGTH, [0] * LENGTH, "stop")
        traces.append(Trace(f"t{number}", 0, 0, "toolbox", "train", 0, [turn], [], 0.0, False, []))
    half = LENGTH // 2
    return StepBatch(
        0,
        [policy_sample(trace, rng.uniform(-1, 1)) for trace in traces],
        [hinted_view(trace, 0, ids(3), trace.turns[0].context_ids[-2:]) for trace in traces],
        [
            PairSample(f"p{n}", ids(5), ids(half), ids(half), (-9.0, -8.0))
            for n in range(len(traces))
        ],
    )


@pytest.mark.parametrize(
    ("objective", "loss"), [("none", "grpo"), ("taid", "cispo"), ("entropy_opd", "prime_rl")]
)
def test_no_tensor_of_a_step_holds_the_logits_of_a_microbatch(
    build_config: Any, rng: random.Random, objective: str, loss: str
) -> None:
    model, reference = wide_model(), wide_model().requires_grad_(False)
    config = build_config(
        loss={"type": loss, **({"kl_beta": 0.1} if loss == "grpo" else {})},
        sdpo={"alpha": ALPHA, "objective": objective},
        replay=ALL_ON["replay"],
        trainer={"microbatch_tokens": 4 * ROWS},
    )
    step, batch = OptimizerStep(model, reference, config), long_batch(rng)
    assert batch.action_tokens == batch.sdpo_tokens == ROWS
    before = weights_of(model)
    with LargestTensor() as largest:
        metrics = taught(step, model, batch)
    assert None not in metrics.values()
    assert largest_change(before, weights_of(model)) > 0
    assert largest.numbers <= CPU_BLOCK < ROWS * VOCABULARY // 3


def test_the_largest_tensor_of_a_plain_forward_is_its_logits() -> None:
    """What the test above would see."""
    with LargestTensor() as largest, torch.no_grad():
        logits(wide_model(), list(range(100)))
    assert largest.numbers >= 100 * VOCABULARY


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
