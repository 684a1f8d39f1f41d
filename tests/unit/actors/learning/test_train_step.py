"""The three-channel step: microbatches add up, channels that are off cost nothing, errors stop."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import (
    ALL_ON,
    GivenStates,
    Make,
    batch_of,
    flat,
    largest_change,
    own_logprobs,
    referred,
    taught,
    weights_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from composer_mesh.actors.learning.weight_update import FiniteChecks, GradientNotFinite, UpdatePart
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PolicySample


@pytest.mark.parametrize("budget", [512, 700, 1100, 2000])
def test_how_a_step_is_split_changes_neither_its_losses_nor_its_weights(
    make: Make, build_model: Any, rng: random.Random, budget: int
) -> None:
    long = [3] * 480
    whole_model, whole = make(**ALL_ON, trainer={"microbatch_tokens": 100_000, "lr": 1e-3})
    batch = batch_of(whole_model, rng, samples=8, pairs=5)
    first = batch.samples[0]
    padded = replace(
        first,
        ids=long + first.ids,
        mask=[False] * 480 + first.mask,
        logprobs=[0.0] * 480 + first.logprobs,
        versions=[-1] * 480 + first.versions,
    )
    batch = replace(batch, samples=[padded, *batch.samples[1:]])
    wide = [
        referred(whole_model, replace(pair, context_ids=long[: 60 + 30 * n]))
        for n, pair in enumerate(batch.pairs)
    ]
    # No pair is a tie, which rounding would decide.
    wide = [replace(pair, reference=(pair.reference[0] - 1, pair.reference[1])) for pair in wide]
    batch = replace(batch, pairs=wide)
    teacher = build_model(2)
    split_model, split = make(**ALL_ON, trainer={"microbatch_tokens": budget, "lr": 1e-3})
    expected, found = taught(whole, teacher, batch), taught(split, teacher, batch)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert largest_change(weights_of(whole_model), weights_of(split_model)) < 1e-5


def test_all_channels_together_train_the_weighted_sum(make: Make, rng: random.Random) -> None:
    model, step = make(2, **ALL_ON)
    batch = batch_of(model, rng, pairs=4)
    metrics = taught(step, make(3)[0], batch)
    policy, sdpo, replay = (metrics[f"loss/{name}"] for name in ("policy", "sdpo", "replay"))
    assert policy is not None
    assert sdpo is not None
    assert replay is not None
    assert metrics["loss/total"] == pytest.approx(policy + 0.5 * sdpo + 0.3 * replay)
    assert sdpo > 0.01


def test_scheduled_weights_train_as_fixed_ones_of_the_same_size(
    make: Make, rng: random.Random
) -> None:
    run = {"run": {"name": "unit", "seed": 3, "steps": 4}}
    rising = {"alpha": 0.8, "alpha_schedule": {"warmup_steps": 4}}
    falling = {**ALL_ON["replay"], "beta": 0.4, "beta_schedule": {"decay": "linear"}}
    scheduled_model, scheduled = make(2, **run, sdpo=rising, replay=falling)
    batch = replace(batch_of(scheduled_model, rng, pairs=3), step=1)
    fixed = {"sdpo": {"alpha": 0.4}, "replay": {**ALL_ON["replay"], "beta": 0.3}}
    fixed_model, fixed_step = make(2, **run, **fixed)
    teacher = make(3)[0]
    found, expected = taught(scheduled, teacher, batch), taught(fixed_step, teacher, batch)
    assert (found["sdpo/alpha"], found["replay/beta"]) == pytest.approx((0.4, 0.3))
    assert found == pytest.approx(expected)
    assert largest_change(weights_of(fixed_model), weights_of(scheduled_model)) < 1e-7


def test_the_weight_of_a_channel_scales_its_gradient(make: Make, rng: random.Random) -> None:
    model, _ = make(2)
    batch = flat(batch_of(model, rng, pairs=3))
    distil, prefer = replace(batch, pairs=[]), replace(batch, views=[])
    teacher, norms = make(3)[0], {}
    for weight in (0.25, 1.0):
        weighted = {"sdpo": {"alpha": weight}, "replay": {**ALL_ON["replay"], "beta": weight}}
        step = make(2, **weighted)[1]
        norms["sdpo", weight] = taught(step, teacher, distil)["policy/grad_norm"]
        norms["replay", weight] = make(2, **weighted)[1].run(prefer, None)["policy/grad_norm"]
    for channel in ("sdpo", "replay"):
        assert norms[channel, 0.25] == pytest.approx(0.25 * (norms[channel, 1.0] or 0.0), rel=1e-4)
        assert norms[channel, 1.0]


def test_on_policy_the_gradient_is_that_of_advantage_times_log_prob_per_token(
    make: Make, rng: random.Random
) -> None:
    model, step = make()
    batch = replace(batch_of(model, rng, noise=0.0), views=[])
    tokens = sum(sum(sample.mask) for sample in batch.samples)
    for sample in batch.samples:
        ids, mask = torch.tensor([sample.ids]), torch.tensor([sample.mask])[:, 1:]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1], -1)
        own = logprobs.gather(-1, ids[:, 1:, None])[..., 0][mask]
        (-sample.advantage * own.sum() / tokens).backward()
    squares = [float((weights.grad**2).sum()) for weights in model.parameters()]
    found = step.run(batch, None)["policy/grad_norm"]
    assert found == pytest.approx(math.sqrt(sum(squares)), rel=1e-4)


def test_a_channel_that_is_off_is_reported_as_none_and_trains_nothing(
    make: Make, rng: random.Random
) -> None:
    model, step = make(2, reference=None)
    batch = batch_of(model, rng, pairs=3)
    metrics = step.run(batch, None)
    assert metrics["loss/sdpo"] is None
    assert metrics["loss/replay"] is None
    assert metrics["loss/total"] == metrics["loss/policy"]
    bare_model, bare = make(2, reference=None)
    bare.run(replace(batch, views=[], pairs=[]), None)
    assert largest_change(weights_of(model), weights_of(bare_model)) == 0


def test_a_channel_without_data_is_off_although_it_has_a_weight(
    make: Make, rng: random.Random
) -> None:
    model, step = make(2, **ALL_ON)
    batch = replace(batch_of(model, rng), views=[], pairs=[])
    metrics = step.run(batch, None)
    assert metrics["loss/policy"] is not None
    assert (metrics["loss/sdpo"], metrics["loss/replay"]) == (None, None)


def test_pairs_alone_train_without_any_rollout(make: Make, rng: random.Random) -> None:
    model, step = make(2, **ALL_ON)
    before = weights_of(model)
    metrics = step.run(replace(batch_of(model, rng, pairs=3), samples=[], views=[]), None)
    assert metrics["loss/policy"] is None
    assert metrics["loss/replay"] is not None
    assert largest_change(before, weights_of(model)) > 0


def test_without_advantages_and_other_channels_the_weights_stay_as_they_are(
    make: Make, rng: random.Random
) -> None:
    model, step = make()
    before = weights_of(model)
    metrics = step.run(flat(batch_of(model, rng)), None)
    assert metrics["loss/total"] == 0
    assert metrics["policy/grad_norm"] == 0
    assert largest_change(before, weights_of(model)) == 0


def test_advantages_move_the_sampled_tokens_the_way_they_point(
    make: Make, rng: random.Random
) -> None:
    model, step = make(trainer={"lr": 1e-3})
    batch = batch_of(model, rng, samples=2, noise=0.0)
    good, bad = (
        replace(sample, advantage=sign)
        for sample, sign in zip(batch.samples, (1.0, -1.0), strict=True)
    )
    before = [own_logprob(model, good), own_logprob(model, bad)]
    step.run(replace(batch, samples=[good, bad], views=[]), None)
    assert own_logprob(model, good) > before[0]
    assert own_logprob(model, bad) < before[1]


def own_logprob(model: Any, sample: PolicySample) -> float:
    with torch.no_grad():
        return float(own_logprobs(model, sample.ids)[torch.tensor(sample.mask)[1:]].sum())


def test_log_probs_of_the_same_weights_make_a_ratio_of_one(make: Make, rng: random.Random) -> None:
    model, step = make()
    metrics = step.run(batch_of(model, rng, noise=0.0), None)
    assert metrics["logprob_mismatch/kl_k3"] == pytest.approx(0, abs=1e-9)
    assert metrics["policy/clipped_fraction"] == 0


def test_a_signal_of_another_batch_is_refused(make: Make, rng: random.Random) -> None:
    model, step = make(**ALL_ON)
    batch = batch_of(model, rng)
    rows = batch.sdpo_tokens
    with pytest.raises(ValueError, match=f"{rows - 1} rows but the views have {rows} tokens"):
        step.run(batch, GivenStates(batch, torch.zeros(rows - 1, model.config.hidden_size)))


def test_views_without_a_signal_are_refused(make: Make, rng: random.Random) -> None:
    model, step = make(**ALL_ON)
    batch = batch_of(model, rng)
    with pytest.raises(ValueError, match=f"step 0 has {len(batch.views)} views but no signal"):
        step.run(batch, None)


def test_preference_starts_at_log_2_where_policy_and_reference_are_equal(
    make: Make, rng: random.Random
) -> None:
    model, step = make(1, reference=1, **ALL_ON)
    metrics = step.run(replace(batch_of(model, rng, pairs=5), views=[]), None)
    assert metrics["loss/replay"] == pytest.approx(math.log(2), abs=1e-6)


def test_preference_raises_the_chosen_answer_over_the_rejected_one(
    make: Make, rng: random.Random
) -> None:
    model, step = make(**ALL_ON)
    batch = replace(batch_of(model, rng, pairs=4), samples=[], views=[])
    metrics = [step.run(batch, None) for _ in range(4)]
    losses = [one["loss/replay"] or 0.0 for one in metrics]
    assert losses == sorted(losses, reverse=True)
    assert metrics[-1]["replay/accuracy"] == 1


def test_distillation_brings_the_student_to_the_teacher(
    make: Make, build_model: Any, rng: random.Random
) -> None:
    model, step = make(**ALL_ON)
    batch = flat(batch_of(model, rng, samples=4))
    teacher = build_model(2)
    losses = [taught(step, teacher, batch)["loss/sdpo"] or 0.0 for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_an_empty_hint_leaves_nothing_to_distil(make: Make, rng: random.Random) -> None:
    model, step = make(**ALL_ON)
    batch = batch_of(model, rng, samples=3)
    traces = {sample.trace_id for sample in batch.samples}
    unhinted = [view for view in batch.views if view.offset == 0 and view.trace_id in traces]
    assert unhinted
    batch = replace(batch, views=unhinted)
    metrics = taught(step, model, batch)
    assert metrics["loss/sdpo"] == pytest.approx(0, abs=1e-8)


def test_each_view_meets_its_own_rows_of_the_signal(
    make: Make, build_model: Any, rng: random.Random
) -> None:
    """Views are in another order than the samples; the order of both together does not matter."""
    model, step = make(**ALL_ON)
    batch = batch_of(model, rng)
    order: list[HintedView] = batch.views[::-1]
    teacher = build_model(2)
    one = taught(step, teacher, batch)
    _, again = make(**ALL_ON)
    two = taught(again, teacher, replace(batch, views=order))
    assert one["loss/sdpo"] == pytest.approx(two["loss/sdpo"], rel=1e-6)


def test_a_gradient_that_is_not_finite_raises_and_changes_no_weight(
    make: Make, rng: random.Random
) -> None:
    model, step = make(**ALL_ON)
    batch = batch_of(model, rng)
    before = weights_of(model)
    with pytest.raises(GradientNotFinite, match="the sdpo loss is nan in microbatch 1 of "):
        step.run(
            batch,
            GivenStates(batch, torch.full((batch.sdpo_tokens, model.config.hidden_size), math.nan)),
        )
    assert largest_change(before, weights_of(model)) == 0


def test_a_gradient_that_is_not_finite_names_channel_rollouts_and_rate(
    make: Make, rng: random.Random
) -> None:
    model, step = make(**ALL_ON, trainer={"lr": 1e-3, "microbatch_tokens": 512})
    batch = batch_of(model, rng, samples=6)
    one, before = batch.samples[3], 512 - len(batch.samples[3].ids)
    bad = replace(  # it fills a microbatch of its own
        one,
        ids=[3] * before + one.ids,
        mask=[False] * before + one.mask,
        logprobs=[0.0] * before + one.logprobs,
        versions=[-1] * before + one.versions,
        advantage=math.nan,
    )
    batch = replace(batch, step=0, samples=[*batch.samples[:3], bad, *batch.samples[4:]], views=[])
    with pytest.raises(GradientNotFinite) as raised:
        step.run(batch, None)
    (found,) = raised.value.found
    assert found.what == "the policy loss is nan"
    assert found.part.rollouts == (bad.trace_id,)
    assert "at learning rate 0.001: the policy loss is nan in microbatch" in str(raised.value)
    fields = raised.value.fields()
    assert (fields["step"], fields["lr"]) == (1, 1e-3)
    assert fields["rollouts"] == [bad.trace_id]
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.found) == (str(raised.value), raised.value.found)


def test_a_backward_that_overflows_is_told_from_a_loss_that_does(
    make: Make, rng: random.Random
) -> None:
    model, step = make()
    first = next(model.parameters())
    first.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(GradientNotFinite, match="are finite, so a layer's backward overflowed"):
        step.run(flat(batch_of(model, rng)), None)


def test_weights_that_are_not_finite_already_are_named_as_the_cause(
    make: Make, rng: random.Random
) -> None:
    model, step = make()
    batch = flat(batch_of(model, rng))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = math.nan
    rows = model.get_input_embeddings().weight.shape[0]
    with pytest.raises(GradientNotFinite, match=f"{rows} weights of version 0 are not finite"):
        step.run(batch, None)


def test_the_first_gradient_that_is_not_finite_is_found_where_all_losses_are() -> None:
    checks, states = FiniteChecks(), [torch.ones(2, 3, requires_grad=True) for _ in range(3)]
    for number, (one, factor) in enumerate(zip(states, (1.0, math.inf, math.nan), strict=True)):
        checks.watch(UpdatePart(f"microbatch {number}", (f"rollout {number}",)), one)
        (one * factor).sum().backward()
    checks.note(UpdatePart("microbatch 0"), {"policy": 1.0})
    (found,) = checks.found()
    assert str(found) == (
        "the gradient at the model's last states is not finite in microbatch 1 (rollouts rollout 1)"
    )


def test_no_gradient_is_left_over_from_the_step_before(make: Make, rng: random.Random) -> None:
    model, step = make(trainer={"adam_beta1": 0.0})
    batch = batch_of(model, rng)
    step.run(batch, None)
    before = weights_of(model)
    step.run(flat(batch), None)
    assert largest_change(before, weights_of(model)) == 0


def test_the_gradient_norm_is_reported_before_it_is_clipped(make: Make, rng: random.Random) -> None:
    model, loose = make(trainer={"grad_clip": 1e9})
    batch = batch_of(model, rng)
    tight = make(trainer={"grad_clip": 1e-4})[1]
    norms = [step.run(batch, None)["policy/grad_norm"] for step in (loose, tight)]
    assert norms[0] == pytest.approx(norms[1])


def test_the_rate_of_a_step_depends_on_its_number(make: Make, rng: random.Random) -> None:
    model, step = make(trainer={"lr": 0.01, "lr_schedule": "linear"})
    batch = batch_of(model, rng)
    used = [step.run(replace(batch, step=n), None)["policy/lr"] for n in range(3)]
    assert used == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])


class NumbersRead(TorchDispatchMode):
    """Counts the tensors that are read as numbers, for which a GPU's host would wait."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_no_loss_or_figure_is_read_before_the_last_microbatch_has_ended(
    make: Make, rng: random.Random
) -> None:
    read = []
    for budget in (512, 100_000):
        model, step = make(replay=ALL_ON["replay"], trainer={"microbatch_tokens": budget})
        batch = replace(batch_of(model, rng, samples=8, pairs=3), views=[])
        with NumbersRead() as numbers:
            step.run(batch, None)
        read.append(numbers.count)
    assert read[0] == read[1] > 0
