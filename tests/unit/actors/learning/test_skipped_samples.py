"""A step without its samples of advantage 0 is the step with them, but for their forward.

The learning rate: an even rise, a peak, and a fall to where it shall end.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from step_batches import ALL_ON, Make, batch_of, flat, largest_change, taught, weights_of

from composer_mesh.actors.learning.weight_update import learning_rate
from composer_mesh.channels.policy import without_zero_advantages
from composer_mesh.channels.weights import channel_weight
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.rollouts.batches import StepBatch

PLAIN: list[dict[str, Any]] = [
    *({"aggregation": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
    {"ratio_level": "sequence"},
    {"correction": "token_truncate"},
    {"off_policy_threshold": 0.01},
    *({"type": name} for name in ("cispo", "sapo", "gmpo", "vespo", "dppo", "reinforce")),
    {"type": "decoupled_ppo"},
    {"type": "prime_rl", "kl_tau": 0.0},
    {"type": "prime_rl_ipo", "kl_tau": 0.0},
]


WITH_OTHER_TERMS: list[dict[str, Any]] = [
    {"kl_beta": 0.1},
    {"type": "sapo", "kl_beta": 0.1},
    {"entropy_coef": 0.01},
    {"type": "reinforce", "entropy_coef": 0.01},
    {"type": "prime_rl"},
    {"type": "prime_rl_ipo"},
    {"type": "prime_rl", "kl_tau": 0.0, "teacher_tau": 0.1},
]


EQUAL = ("loss/total", "loss/policy", "policy/grad_norm", "tokens/trained", "policy/lr")


def mixed(model: Any, rng: random.Random) -> StepBatch:
    """A batch of which every other sample has advantage 0, and one of those has views."""
    batch = batch_of(model, rng, samples=8)
    samples = [
        replace(sample, advantage=0.0) if place % 2 else sample
        for place, sample in enumerate(batch.samples)
    ]
    views = [view for view in batch.views if view.trace_id in ("t1", "t2")]
    return replace(batch, samples=samples, views=views)


def shortened(batch: StepBatch) -> StepBatch:
    samples, skipped = without_zero_advantages(batch.samples, batch.views)
    assert skipped.sequences
    return replace(batch, samples=samples, skipped=skipped)


@pytest.mark.parametrize("loss", [*PLAIN, *WITH_OTHER_TERMS], ids=str)
def test_a_loss_says_whether_a_sample_with_advantage_0_has_a_gradient(
    make: Make, build_config: Any, rng: random.Random, loss: dict[str, Any]
) -> None:
    model, step = make(reference=2, loss=loss)
    batch = flat(replace(batch_of(model, rng), views=[]))
    norm = step.run(batch, None)["policy/grad_norm"]
    assert (norm != 0.0) == build_config(loss=loss).loss.trains_zero_advantages
    assert (norm != 0.0) == (loss in WITH_OTHER_TERMS)


@pytest.mark.parametrize("loss", PLAIN, ids=str)
def test_losses_and_weights_are_those_of_the_step_with_all_samples(
    make: Make, rng: random.Random, loss: dict[str, Any]
) -> None:
    """Up to rounding, since other rows share a forward."""
    whole_model, whole = make(loss=loss)
    batch = replace(mixed(whole_model, rng), views=[])
    short_model, short = make(loss=loss)
    expected, found = whole.run(batch, None), short.run(shortened(batch), None)
    for name in EQUAL:
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert largest_change(weights_of(whole_model), weights_of(short_model)) < 1e-5
    assert expected["tokens/skipped"] == 0
    assert 0 < (found["tokens/skipped"] or 0) < (found["tokens/trained"] or 0)


def test_all_channels_are_those_of_the_step_with_all_samples(
    make: Make, rng: random.Random
) -> None:
    whole_model, whole = make(2, **ALL_ON)
    batch = replace(mixed(whole_model, rng), pairs=batch_of(whole_model, rng, pairs=3).pairs)
    short_model, short = make(2, **ALL_ON)
    expected, found = (
        taught(step, make(3)[0], one) for step, one in ((whole, batch), (short, shortened(batch)))
    )
    for name in (*EQUAL, "loss/sdpo", "loss/replay"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert largest_change(weights_of(whole_model), weights_of(short_model)) < 1e-5


@pytest.mark.parametrize("packing", [False, True])
def test_skipped_tokens_pass_through_no_model(
    make: Make, rng: random.Random, packing: bool
) -> None:
    model, step = make(trainer={"packing": packing, "microbatch_tokens": 512})
    batch = replace(mixed(model, rng), views=[])
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _module, ids, _states: seen.append(ids[0].numel())
    )
    needed = [len(sample.ids) for sample in batch.samples if sample.advantage]
    step.run(shortened(batch), None)
    assert sum(seen) <= max(needed) * len(needed)
    short, seen[:] = sum(seen), []
    step.run(replace(batch, step=1), None)
    assert sum(seen) > short


def test_a_step_that_skips_everything_moves_the_weights_as_gradients_of_0_would(
    make: Make, rng: random.Random
) -> None:
    """By the optimizer's momentum of the step before."""
    whole_model, whole = make()
    first = replace(batch_of(whole_model, rng), views=[])
    nothing = flat(replace(first, step=1))
    short_model, short = make()
    whole.run(first, None)
    short.run(first, None)
    before = weights_of(short_model)
    expected, found = whole.run(nothing, None), short.run(shortened(nothing), None)
    for name in EQUAL:
        assert found[name] == expected[name], name
    assert found["loss/policy"] == 0.0
    after = (weights_of(whole_model), weights_of(short_model))
    assert all(torch.equal(after[0][name], after[1][name]) for name in before)
    assert largest_change(before, after[1]) > 0


def rates(steps: int, **trainer: Any) -> list[float]:
    config = TrainerConfig(lr=1.0, **trainer)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_a_constant_rate_stays() -> None:
    assert rates(5, lr_schedule="constant") == [1.0] * 5


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_evenly_to_the_peak(schedule: str) -> None:
    found = rates(12, lr_schedule=schedule, warmup_steps=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_and_cosine_fall_to_nothing_at_the_end() -> None:
    linear = rates(10, lr_schedule="linear")
    assert linear == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = rates(10, lr_schedule="cosine")
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 10)) for n in range(10)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_fall_ends_at_its_share_of_the_peak(schedule: str) -> None:
    config = TrainerConfig(lr=2.0, lr_schedule=schedule, warmup_steps=3, min_lr_ratio=0.1)
    found = [learning_rate(config, step, 20) for step in range(21)]
    assert found[2] == found[3] == 2.0
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[20] == pytest.approx(0.2)


def test_the_weight_of_a_channel_changes_as_the_rate_does() -> None:
    schedule = ChannelSchedule(decay="cosine", warmup_steps=3, min_ratio=0.1)
    expected = rates(20, lr_schedule="cosine", warmup_steps=3, min_lr_ratio=0.1)
    found = [channel_weight(0.5, schedule, step, 20) for step in range(20)]
    assert found == pytest.approx([0.5 * one for one in expected])
    assert channel_weight(0.5, ChannelSchedule(), 7, 20) == 0.5


def test_a_share_of_a_weight_that_never_falls_is_refused() -> None:
    with pytest.raises(ValidationError, match="never falls: set decay to 'linear'"):
        ChannelSchedule(min_ratio=0.1)


def test_a_share_of_a_rate_that_never_falls_is_refused() -> None:
    with pytest.raises(ValidationError, match="never falls: set lr_schedule to 'linear'"):
        TrainerConfig(min_lr_ratio=0.1)
