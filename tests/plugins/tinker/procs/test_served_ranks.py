"""Two trainer ranks of a training server make of clients' calls what one makes of them."""

import random
from pathlib import Path
from typing import Any

import learning
import numpy as np
import pytest
import served_ranks
import torch
from rank_processes import run_ranks
from step_batches import batch_of
from three_channel_steps import TopKTeacher, client_step

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.plugins.tinker.client.sequences import three_channel_arrays
from composer_mesh.plugins.tinker.models.messages import Datum, TrainCall, TrainResult

pytestmark = pytest.mark.timeout(1200)  # one fixture does the work of six processes
BOUND = 1e-5


def three_channels(model: Any) -> TrainCall:
    """Return a step of all three channels, whose pairs are two sequences each."""
    batch = batch_of(model, random.Random(5), samples=5, pairs=3)
    step = client_step(batch, TopKTeacher(model, batch.views), model)
    data = tuple(Datum(one.tokens, one.inputs) for one in three_channel_arrays(step))
    return TrainCall("x", 0, "forward_backward", data, "three_channel", step.options)


class World:
    """The policy, what two ranks made of the calls, and what one makes of them here."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.folder = root / "policy"
        channels = three_channels(learning.write_policy(self.folder))
        self.one = served_ranks.work(Ranks(), self.folder, root, channels)
        given = (root / "rendezvous", self.folder, root, channels)
        run_ranks(served_ranks.both, given, 2)
        self.two: list[dict[str, Any]] = [
            torch.load(root / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
        ]
        given = (root / "rendezvous-of-3", self.folder, root, channels)
        run_ranks(served_ranks.three, given, 3)
        self.three: list[dict[str, Any]] = [
            torch.load(root / f"rank-{rank}-of-3.pt", weights_only=False) for rank in range(3)
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("served-ranks"))


def close(found: list[TrainResult], expected: list[TrainResult]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.error == other.error
        assert one.metrics == pytest.approx(dict(other.metrics), rel=BOUND, abs=BOUND)
        for own, theirs in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=0, atol=BOUND)


def same_states(found: Any, expected: Any, bound: float) -> None:
    assert found.keys() == expected.keys()
    for model, tensors in expected.items():
        assert found[model].keys() == tensors.keys()
        for name, values in tensors.items():
            assert float((found[model][name] - values).abs().max()) <= bound, (model, name)


def test_sums_over_ranks_are_those_in_their_order_bit_for_bit(world: World) -> None:
    first, second, third = served_ranks.PARTS
    for rank in world.three:
        assert torch.equal(rank["sum"], first + second + third)
    for rank in world.two:
        assert torch.equal(rank["sum"], first + second)
    assert torch.equal(world.one["sum"], first)
    assert not torch.equal(first + second + third, third + second + first)


@pytest.mark.parametrize("name", ["steps", "channels"])
def test_more_ranks_than_rows_make_what_one_rank_makes(world: World, name: str) -> None:
    close(world.three[0][name]["results"], world.one[name]["results"])
    for rank in world.three:
        same_states(rank[name]["states"], world.one[name]["states"], BOUND)
        same_states(rank[name]["states"], world.three[0][name]["states"], 0.0)


def test_each_rank_keeps_its_rows_of_the_policy_alone(world: World) -> None:
    for rank in world.two:
        assert rank["kept"] == pytest.approx(0.5, abs=0.05)
        assert rank["kept of replicated"] == 1.0
    assert world.one["kept"] == 1.0


@pytest.mark.parametrize("name", ["steps", "replicated", "small"])
def test_five_steps_of_models_of_uneven_rows_are_those_of_one_rank(world: World, name: str) -> None:
    expected = world.one[name]
    assert all(not one.error for one in expected["results"])
    close(world.two[0][name]["results"], expected["results"])
    close(world.two[0][name]["forward"], expected["forward"])
    same_states(world.two[0][name]["states"], expected["states"], BOUND)
    before = served_ranks.opened(served_ranks.config_of(1), world.folder, Ranks())
    for model, tensors in expected["states"].items():
        begun = before.models[model].weights.detach()
        assert float((tensors["weights"] - begun).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["steps", "replicated", "small", "channels", "saved", "faults"])
def test_all_ranks_hold_the_same_bits(world: World, name: str) -> None:
    same_states(world.two[1][name]["states"], world.two[0][name]["states"], 0.0)
    if name == "steps":
        for first, second in zip(*(two[name]["results"] for two in world.two), strict=True):
            assert first.metrics == second.metrics


@pytest.mark.parametrize("name", ["channels", "cut channels", "head", "targets"])
def test_calls_of_other_shapes_and_losses_are_those_of_one_rank(world: World, name: str) -> None:
    expected = world.one[name]
    assert all(not one.error for one in expected["results"])
    close(world.two[0][name]["results"], expected["results"])
    same_states(world.two[0][name]["states"], expected["states"], BOUND)
    if "channels" in name:
        parts = {"loss/policy:sum", "loss/sdpo:sum", "loss/replay:sum"}
        assert parts <= expected["results"][0].metrics.keys()


def test_calls_repeated_in_their_shapes_give_the_same_bits(world: World) -> None:
    for ranks in (world.one, *world.two):
        found = ranks["replayed"]
        same_states(found["again"], found["first"], 0.0)
        shapes = set()
        for first, again in (pair for step in found["results"] for pair in step):
            assert first.metrics == again.metrics
            shapes.add(None if first.shape is None else first.shape.models)
            for own, theirs in zip(first.logprobs, again.logprobs, strict=True):
                np.testing.assert_array_equal(own, theirs)
        assert shapes > {None, 1}
        assert max(filter(None, shapes)) > 1


def test_states_are_written_once_and_read_by_all(world: World) -> None:
    for rank in world.two:
        found = rank["saved"]
        same_states(found["after"], found["before"], 0.0)
        assert not found["loaded"].error
        states = found["states"]
        assert torch.equal(states["b"]["weights"], states["a"]["weights"])
        assert torch.equal(states["b"]["exp_avg_sq"], states["a"]["exp_avg_sq"])
        assert "holds no state for this model" in found["failed"].error
        assert found["positions"] == {"a": 4, "b": 5, "c": 4, "d": 4, "e": 4}
    assert world.two[0]["saved"]["told"].metrics["bytes"] > 0


@pytest.mark.parametrize("name", ["faults", "faults of 0"])
def test_data_that_fail_on_one_rank_fail_alone_and_leave_none_waiting(
    world: World, name: str
) -> None:
    for rank in world.two:
        found = rank[name]["results"]
        for case, text in (
            ("ids", "the model has ids from 0 to"),
            ("targets", "target_tokens are from"),
            ("shape", "the trainer failed"),
            ("nan", "not finite"),
            ("unread", "not readable here"),
            ("loss", "not readable here"),
        ):
            failed, beside = found[case]
            assert text in failed.error, case
            assert not beside.error, case
        assert not found["after"][0].error
    close(world.two[0][name]["results"]["after"], world.one[name]["results"]["after"])
    same_states(world.two[0][name]["states"], world.one[name]["states"], 1e-4)


def test_a_call_during_which_another_rank_ends_is_no_fault_of_its_data(
    world: World, tmp_path: Path
) -> None:
    given = (tmp_path / "rendezvous", world.folder, tmp_path)
    run_ranks(served_ranks.left_alone, given, 2)
    assert "lost: rank 0 failed while others waited for it" in (tmp_path / "told").read_text()


def test_all_weights_sharded_over_ranks_are_those_of_one(world: World) -> None:
    expected, (first, second) = world.one["whole"], (two["whole"] for two in world.two)
    assert all(not one.error for one in expected["results"])
    close(first["results"], expected["results"])
    same_states(first["states"], expected["states"], BOUND)
    assert "not finite" in first["failed"].error
    assert "not finite" in second["failed"].error
    assert first["kept"] + second["kept"] == pytest.approx(1.0)
    assert first["kept"] == pytest.approx(0.5, abs=0.05)
    close(first["loaded"], expected["loaded"])


def test_all_weights_that_come_back_from_a_file_go_on_bit_for_bit(world: World) -> None:
    for found in (world.one["whole"], world.two[0]["whole"]):
        same_states(found["again"], found["states"], 0.0)
