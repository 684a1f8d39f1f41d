"""Shares of the channels: exact norms, the same step, bounds that hold, resumed bit for bit."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_batches import (
    ALL_ON,
    NARROW,
    Make,
    batch_of,
    begun_with,
    flat,
    largest_change,
    taught,
    weights_of,
)

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local

MEASURED = {"update_share_every": 1}
LOOSE = {"grad_clip": 1e9}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {"microbatch_tokens": 64},
    "packed": {"packing": True, "microbatch_tokens": 128},
    "shared": {"prefix_sharing": True, "microbatch_tokens": 256},
}


def compared(batch: Any, step: int) -> Any:
    """The batch of a step, with a view that is compared and a share of successes."""
    views = [replace(batch.views[0], compared=True), *batch.views[1:]]
    return replace(batch, step=step, views=views, success=0.1 * (1 + step))


def only(batch: Any, channel: str) -> Any:
    """The batch with the data of one channel."""
    kept = batch if channel == "policy" else flat(batch)
    return replace(
        kept,
        views=batch.views if channel == "sdpo" else [],
        pairs=batch.pairs if channel == "replay" else [],
    )


@pytest.mark.parametrize("split", SPLITS)
def test_a_norm_is_that_of_a_step_with_the_channel_alone(
    make: Make, rng: random.Random, split: str
) -> None:
    trainer = {"trainer": {**LOOSE, **SPLITS[split]}}
    model, step = make(2, **NARROW, **ALL_ON, trainer={**trainer["trainer"], **MEASURED})
    batch = batch_of(model, rng, pairs=4)
    if split == "shared":
        batch = begun_with(batch, [5, 6, 7, 8, 9], [9, 8, 7, 6])
    teacher = make(3)[0]
    found = taught(step, teacher, batch)
    norms = {}
    for channel in ("policy", "sdpo", "replay"):
        alone = make(2, **NARROW, **ALL_ON, **trainer)[1]
        norms[channel] = taught(alone, teacher, only(batch, channel))["policy/grad_norm"]
        assert found[f"update/norm_{channel}"] == pytest.approx(norms[channel], rel=1e-4)
    for channel, norm in norms.items():
        share = norm / math.fsum(norms.values())
        assert found[f"update/share_{channel}"] == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("split", SPLITS)
def test_a_measured_step_trains_as_one_that_is_not(
    make: Make, rng: random.Random, split: str
) -> None:
    trainer = SPLITS[split]
    plain_model, plain = make(2, **NARROW, **ALL_ON, trainer=trainer)
    model, step = make(2, **NARROW, **ALL_ON, trainer={**trainer, **MEASURED})
    batch = begun_with(batch_of(model, rng, pairs=4), [5, 6, 7, 8, 9], [9, 8, 7, 6])
    teacher = make(3)[0]
    expected, found = taught(plain, teacher, batch), taught(step, teacher, batch)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert not any(name.startswith("update/") for name in expected)
    assert largest_change(weights_of(plain_model), weights_of(model)) < 1e-5


def test_only_every_nth_step_is_measured_and_the_others_are_the_same_to_the_bit(
    make: Make, rng: random.Random
) -> None:
    plain_model, plain = make(2, **ALL_ON)
    model, step = make(2, **ALL_ON, trainer={"update_share_every": 3})
    teacher = make(3)[0]
    batch = replace(batch_of(model, rng, pairs=3), step=1)
    assert taught(step, teacher, batch) == taught(plain, teacher, batch)
    assert largest_change(weights_of(plain_model), weights_of(model)) == 0
    assert "update/share_sdpo" in taught(step, teacher, replace(batch, step=3))


def test_a_channel_without_data_has_a_share_of_0(make: Make, rng: random.Random) -> None:
    model, step = make(2, **ALL_ON, trainer=MEASURED)
    found = step.run(replace(batch_of(model, rng), views=[]), None)
    assert found["update/share_policy"] == 1
    assert found["update/share_sdpo"] == found["update/share_replay"] == 0


def test_bounds_hold_and_rescale_one_channel_exactly(make: Make, rng: random.Random) -> None:
    free_model, free = make(2, **ALL_ON, trainer=MEASURED)
    batch, teacher = batch_of(free_model, rng, pairs=4), make(3)[0]
    norms = taught(free, teacher, batch)
    policy, sdpo, replay = (norms[f"update/norm_{name}"] for name in ("policy", "sdpo", "replay"))
    assert policy
    assert sdpo
    assert replay
    bound = 0.5 * sdpo / (policy + sdpo + replay)
    model, step = make(2, **_with(ALL_ON, "sdpo", max_update_share=bound))
    found = taught(step, teacher, batch)
    scale = bound / (1 - bound) * (policy + replay) / sdpo
    assert found["update/scale_sdpo"] == pytest.approx(scale, rel=1e-6)
    assert found["update/share_sdpo"] == pytest.approx(bound, rel=1e-6)
    assert "update/scale_replay" not in found
    fixed_model, fixed = make(2, **_with(ALL_ON, "sdpo", alpha=0.5 * scale))
    taught(fixed, teacher, batch)
    assert largest_change(weights_of(fixed_model), weights_of(model)) < 1e-5
    raised = make(2, **_with(ALL_ON, "replay", min_update_share=0.6))[1]
    assert taught(raised, teacher, batch)["update/share_replay"] == pytest.approx(0.6, rel=1e-6)


def test_a_bound_falls_with_the_weight_of_its_channel(make: Make, rng: random.Random) -> None:
    falling = {"decay": "linear", "by": "success", "start": 0.2, "end": 0.6}
    sdpo = {**ALL_ON["sdpo"], "min_update_share": 0.2, "alpha_schedule": falling}
    replay = {**ALL_ON["replay"], "max_update_share": 0.01, "beta_schedule": falling}
    model, step = make(2, **{**ALL_ON, "sdpo": sdpo, "replay": replay})
    batch, teacher = batch_of(model, rng, pairs=4), make(3)[0]
    before = taught(step, teacher, replace(batch, success=0.3))
    assert before["update/share_sdpo"] == pytest.approx(0.2, rel=1e-6)
    assert before["update/share_replay"] == pytest.approx(0.01, rel=1e-6)
    after = taught(step, teacher, replace(batch, step=1, success=0.3))
    assert after["sdpo/alpha"] == pytest.approx(0.75 * sdpo["alpha"])
    assert after["update/share_sdpo"] == pytest.approx(0.15, rel=1e-6)
    assert after["update/share_replay"] == pytest.approx(0.0075, rel=1e-6)


def test_a_channel_that_is_alone_in_a_step_keeps_its_gradient(
    make: Make, rng: random.Random
) -> None:
    model, step = make(2, **_with(ALL_ON, "sdpo", max_update_share=0.1))
    found = taught(step, make(3)[0], flat(batch_of(model, rng)))
    assert found["update/scale_sdpo"] == 1
    assert found["update/share_policy"] == 0


def test_norms_that_are_not_finite_are_refused_by_the_update(
    make: Make, rng: random.Random
) -> None:
    model, step = make(2, **_with(ALL_ON, "sdpo", max_update_share=0.1))
    batch = batch_of(model, rng)
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    with pytest.raises(RuntimeError, match="weights of version 0 are not finite already"):
        step.run(replace(batch, views=[]), None)


WAYS: dict[str, dict[str, Any]] = {
    "sharded": {"sharding": "fsdp2"},
    "sharded, shared": {"sharding": "fsdp2", "prefix_sharing": True},
    "sharded, recomputed": {"sharding": "fsdp2", "activation_checkpointing": True},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"activation_checkpointing": True, "activation_offload": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_shares_and_bounded_steps_are_the_same_however_they_are_computed(
    build_config: Any,
    build_model: Any,
    tokenizer: Any,
    ranks: Ranks,
    tmp_path: Path,
    way: str,
) -> None:
    student = build_model(1)
    save_policy(student, tokenizer, tmp_path / "policy")

    def trained(more: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
        trainer = {"lr": 1e-2, "sharding": "none", "microbatch_tokens": 512, **more}
        sdpo = {**ALL_ON["sdpo"], "placement": "inline", "min_update_share": 0.4}
        config = build_config(trainer=trainer, sdpo=sdpo, replay=ALL_ON["replay"])
        learner = Learner(config, tmp_path / "policy", ranks)
        rng = random.Random(1)
        batches = [replace(batch_of(student, rng, pairs=3), step=step) for step in range(2)]
        figures = [learner.train(one, learner.own_teacher_outputs(one)) for one in batches]
        return figures, {name: local(one) for name, one in learner.export().items()}

    (plain, plain_weights), (found, weights) = trained({}), trained(WAYS[way])
    names = [name for name in plain[0] if name.startswith(("update/", "loss/", "policy/grad"))]
    assert len([name for name in names if name.startswith("update/")]) == 7
    for one, other in zip(plain, found, strict=True):
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4)
    assert largest_change(plain_weights, weights) < 1e-4


def test_a_run_with_bounds_a_gate_and_a_followed_success_is_resumed_to_the_same_bits(
    build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    student = build_model(1)
    save_policy(student, tokenizer, tmp_path / "policy")
    followed = {"decay": "linear", "by": "success"}
    sdpo = {**ALL_ON["sdpo"], "placement": "inline", "max_update_share": 0.1}
    sdpo |= {"advantage_sites": 4, "min_advantage": -1e6, "alpha_schedule": followed}
    config = build_config(trainer={"lr": 1e-2}, sdpo=sdpo, replay=ALL_ON["replay"])
    rng = random.Random(1)
    batches = [compared(batch_of(student, rng, pairs=3), step) for step in range(3)]

    def steps(learner: Learner, some: list[Any]) -> list[Any]:
        return [learner.train(one, learner.own_teacher_outputs(one)) for one in some]

    whole = Learner(config, tmp_path / "policy", Ranks())
    steps(whole, batches[:2])
    whole.copy()
    whole.write(tmp_path / "checkpoint")
    expected = steps(whole, batches[2:])
    resumed = Learner(config, tmp_path / "policy", Ranks())
    resumed.restore(tmp_path / "checkpoint")
    for one, other in zip(steps(resumed, batches[2:]), expected, strict=True):
        assert {n: v for n, v in one.items() if "time/" not in n and "_per_s" not in n} == {
            n: v for n, v in other.items() if "time/" not in n and "_per_s" not in n
        }
    assert largest_change(whole.export(), resumed.export()) == 0
    assert expected[0]["running/success"] == pytest.approx(0.1 * 0.9 / 1.9 + 0.2 / 1.9)
    assert expected[0]["running/advantage"] != 0


def _with(sections: dict[str, dict[str, Any]], name: str, **values: Any) -> dict[str, Any]:
    return {**sections, name: {**sections[name], **values}}
