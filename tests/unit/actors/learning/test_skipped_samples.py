"""A step without its samples of advantage 0 is the step with them, but for their forward."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import ALL_ON, Make, batch_of, flat, largest_change, taught, weights_of

from composer_mesh.channels.policy.samples import without_zero_advantages
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
