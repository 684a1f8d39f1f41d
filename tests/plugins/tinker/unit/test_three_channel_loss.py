"""The three-channel step of a client is the trainer's: losses, gradients, weights of 5 steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from step_batches import Make, batch_of
from three_channel_steps import ON, TopKTeacher, client_step

from composer_mesh.plugins.tinker.client.sequences import (
    Hinted,
    Pair,
    Rollout,
    TeacherTopK,
    ThreeChannelStep,
    Turn,
    three_channel_arrays,
)
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import AdamParams, Datum, ModelSpec, TrainCall
from composer_mesh.plugins.tinker.models.trained_weights import FullWeights
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch


def data_of(step: ThreeChannelStep) -> tuple[Datum, ...]:
    return tuple(Datum(one.tokens, one.inputs) for one in three_channel_arrays(step))


@pytest.mark.parametrize("most_tokens", [100_000, 200])
def test_five_steps_of_a_client_are_those_of_the_trainer(
    make: Make, build_model: Any, rng: random.Random, most_tokens: int
) -> None:
    trainer = {"lr": 3e-4, "grad_clip": 0.05, "microbatch_tokens": 100_000}
    model, step = make(4, **ON, trainer=trainer)
    reference, teacher_model, base = build_model(4), build_model(2), build_model(4)
    clients = ClientTrainer(base, FullWeights(base), most_tokens, 1)
    clients.open("own", ModelSpec(rank=0), None)
    adam = AdamParams(learning_rate=3e-4, eps=1e-8, grad_clip_norm=0.05)
    for number in range(5):
        batch = batch_of(reference, rng, samples=6, pairs=4)
        batch = StepBatch(number, batch.samples, batch.views, batch.pairs)
        teacher = TopKTeacher(teacher_model, batch.views)
        own = client_step(batch, teacher, reference)
        call = TrainCall(
            "own", 2 * number, "forward_backward", data_of(own), "three_channel", own.options
        )
        (found,) = clients.execute([call])
        assert not found.error
        gradient = clients.models["own"].gradient
        (stepped,) = clients.execute([TrainCall("own", 2 * number + 1, "optim_step", adam=adam)])
        expected = step.run(batch, teacher)
        assert stepped.metrics["grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-5)
        assert found.metrics["loss:sum"] == pytest.approx(expected["loss/total"], abs=1e-5)
        for name in ("policy", "sdpo", "replay"):
            assert expected[f"loss/{name}"] is not None
            assert found.metrics[f"loss/{name}:sum"] == pytest.approx(
                expected[f"loss/{name}"], abs=1e-5
            )
        assert gradient is not None
        clipped = min(1.0, 0.05 / float(gradient.norm()))
        theirs = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
        assert float((gradient * clipped - theirs).abs().max()) < 1e-5
    numbers = clients.models["own"].weights.detach()
    trained = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    assert float((numbers - trained).abs().max()) < 1e-5
    begun = torch.cat([one.detach().reshape(-1) for one in reference.parameters()])
    assert float((begun - trained).abs().max()) > 5e-4


def test_a_channel_without_data_is_not_reported(make: Make, build_model: Any) -> None:
    base = build_model(4)
    clients = ClientTrainer(base, FullWeights(base), 4096, 1)
    clients.open("own", ModelSpec(rank=0), None)
    rollout = Rollout([Turn([5, 6], [7, 8], [-1.0, -2.0])], 1.0)
    step = ThreeChannelStep([rollout])
    call = TrainCall("own", 0, "forward", data_of(step), "three_channel", step.options)
    (found,) = clients.execute([call])
    assert set(found.metrics) == {"loss:sum", "loss/policy:sum"}


def test_a_step_without_what_it_needs_is_refused() -> None:
    rollout = Rollout([Turn([5, 6], [7, 8], [-1.0, -2.0])], 1.0)
    view = HintedView("", 0, [5, 9, 6, 7, 8], [1, 2], [2, 3], [7, 8])
    with pytest.raises(ValueError, match="no ids of a teacher"):
        ThreeChannelStep([rollout], [Hinted(rollout, view)])
    few = TeacherTopK(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="1 rows for an answer of 2 ids"):
        ThreeChannelStep([rollout], [Hinted(rollout, view, few)])
    with pytest.raises(ValueError, match="see `with_reference`"):
        ThreeChannelStep([rollout], pairs=[Pair([1], [2], [3])])
    with pytest.raises(ValueError, match="2 ids and 1 log-probs"):
        Turn([1], [2, 3], [-1.0])
