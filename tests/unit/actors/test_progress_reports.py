"""What the actors report of their work while it is under way, for the deadlines of their calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_batches import ALL_ON, Make, batch_of, sampled_pair
from stepped import Plain, SteppedEngine, request

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import decoder_layers, distinct
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.actors.reference import score_pairs
from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.mesh.progress import PROGRESS, ProgressReport
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.step_plan import teacher_groups


@contextmanager
def reports(least: int) -> Iterator[None]:
    """The block reports at least this many completed parts."""
    before = PROGRESS.count
    yield
    assert PROGRESS.count - before >= least


def last() -> str:
    return ProgressReport(**PROGRESS.report()).last


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def test_a_step_reports_each_microbatch_and_each_update(make: Make, rng: random.Random) -> None:
    model, step = make(**ALL_ON)
    batch = replace(batch_of(model, rng), views=[])
    seen: list[str] = []
    with reports(2):
        step.run(batch, None, lambda: seen.append(last()))
    assert seen == ["microbatch 1 of 1 of step 1"]
    assert last() == "update 1 of 1 of step 1"


def test_pairs_that_are_trained_by_sides_are_reported_one_by_one(
    make: Make, rng: random.Random
) -> None:
    model, step = make(**ALL_ON, trainer={"microbatch_tokens": 512})
    pairs = [sampled_pair(model, rng, f"p{n}") for n in range(2)]
    long = [replaced_context(pair, 510) for pair in pairs]
    batch = replace(batch_of(model, rng), views=[], pairs=long)
    with reports(3):
        step.run(batch, None)


def replaced_context(pair: PairSample, length: int) -> PairSample:
    return replace(pair, context_ids=[3] * (length - len(pair.chosen_ids)))


def test_the_layers_of_a_trained_model_report_their_forward_and_their_backward(
    build_config: Any, folder: Path
) -> None:
    model = trained_model(
        build_config(trainer={"activation_checkpointing": False}), folder, Ranks()
    )
    count = len(decoder_layers(model))
    with reports(count):
        loss = model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum()
    assert last() == f"the forward of layer {count} of {count}"
    with reports(count):
        loss.backward()
    assert last() == f"the backward down to layer 1 of {count}"


def test_a_teacher_reports_each_forward_over_hinted_contexts(
    make: Make, rng: random.Random
) -> None:
    model, _ = make()
    views = batch_of(model, rng).views
    groups = teacher_groups(views, 64, "off")
    assert len(groups) > 1
    with reports(len(groups)):
        hinted_states(model, views, 64)
    assert last().endswith("hinted contexts")


def test_the_reference_reports_each_group_of_pairs(make: Make, rng: random.Random) -> None:
    model, _ = make()
    pairs = [sampled_pair(model, rng, f"p{n}") for n in range(5)]
    with reports(2):
        score_pairs(LanguageModel(model), pairs, 20)
    assert last() == "5 of 5 pairs"


async def test_a_generator_reports_each_decoding_step_and_new_weights() -> None:
    loop = EngineLoop(SteppedEngine(), EngineThread())
    serving = asyncio.create_task(loop.serve())
    with reports(5):
        await loop.ask(request(new=5))
    with reports(1):
        await loop.swap(Plain(2))
    assert last() == "new weights to decode with"
    await cancel_and_wait([serving])
    await loop.close()


def test_a_checkpoint_reports_its_tensors_and_files_as_it_is_written_and_read(
    build_config: Any, folder: Path, tmp_path: Path
) -> None:
    learner = Learner(build_config(), folder, Ranks())
    tensors = len(distinct(learner.export()))
    draft = CheckpointDraft(tmp_path, learner.version)
    with reports(1):
        learner.copy()
    with reports(tensors):
        files = learner.write(draft.folder)
    assert last().endswith("on disk")
    checkpoint = draft.commit(files).folder
    with reports(tensors):
        learner.restore(checkpoint)


@pytest.mark.parametrize("name", ["shm", "disk"])
async def test_weights_report_each_tensor_and_each_part_on_their_way(
    name: Any, tmp_path: Path
) -> None:
    state = {f"weight.{n}": torch.full((4,), float(n)) for n in range(6)}
    publisher = WeightPublisher(
        lambda: state, transport=Transport(name, folder=tmp_path), checksums=True
    )
    with reports(len(state)):
        handle = await publisher.publish(1)
    with reports(2):
        await WeightReceiver().receive(handle)
    await publisher.close()


def test_each_call_of_a_custom_loss_is_reported() -> None:
    watched = RunningCall(1.0).watched(lambda value: value + 1, "users.loss")
    with reports(1):
        assert watched(2) == 3
    assert last() == "a call of users.loss"
