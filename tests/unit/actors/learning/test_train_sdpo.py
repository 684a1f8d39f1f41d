"""The SDPO channel: each objective is its function on whole logits, which the step never makes."""

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
    taught,
    weights_of,
)
from torch import Tensor
from torch.distributions import Categorical

from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.channels.policy.samples import policy_sample
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


@pytest.mark.parametrize("objective", ["none", "entropy_opd"])
def test_only_taid_reports_a_position(make: Make, rng: random.Random, objective: str) -> None:
    model, step = make(sdpo={"alpha": ALPHA, "objective": objective})
    assert "sdpo/taid_t" not in taught(step, model, batch_of(model, rng))


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
    step, batch = ThreeChannelStep(model, reference, config), long_batch(rng)
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
