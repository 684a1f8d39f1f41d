"""The sum of the channels, what a channel that is off costs, and who computes it.

Bounds of shares: exact factors, the smallest change that keeps them, clear refusals.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from repository import ROOT
from torch import Tensor

from composer_mesh.channels.step import StepLoss, StepSums, step_loss, step_metrics
from composer_mesh.channels.weights import bounded_factors, update_shares

FOLDERS = ("actors", "channels", "plugins", "services")


CALLERS = {"actors/learning/update_pass.py", "actors/learning/replay_channel.py"}


CALLERS_IN_PLUGINS = {
    "plugins/frameworks/areal_training.py",
    "plugins/frameworks/harness.py",
    "plugins/frameworks/pair_gradients.py",
    "plugins/frameworks/prime_rl.py",
    "plugins/frameworks/trl/channels.py",
    "plugins/frameworks/verl/losses.py",
    "plugins/tinker/client/step.py",
    "plugins/tinker/client_losses.py",
}


WEIGHTS = {"sdpo": 0.5, "replay": 0.25}


def scalar(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def summed(weights: dict[str, float] | None = None, **losses: Tensor | None) -> StepLoss:
    terms = {name: (lambda loss=loss: loss) for name, loss in losses.items()}
    return step_loss(terms, WEIGHTS if weights is None else weights)


def test_the_total_is_the_weighted_sum_and_so_is_its_gradient() -> None:
    losses = {"policy": scalar(1.0), "sdpo": scalar(10.0), "replay": scalar(100.0)}
    found = summed(**losses)
    found.total().backward()
    assert found.total().item() == 1 + 5 + 25
    assert [loss.grad.item() for loss in losses.values() if loss.grad is not None] == [1, 0.5, 0.25]
    assert {name: loss.item() for name, loss in found.losses.items()} == {
        "policy": 1,
        "sdpo": 10,
        "replay": 100,
    }


def test_any_channel_is_summed_with_its_weight() -> None:
    found = summed({"observations": 0.125}, policy=scalar(1.0), observations=scalar(8.0))
    assert found.total().item() == 2
    assert list(found.by_channel()) == ["policy", "observations"]


def test_losses_of_no_channel_are_counted_with_the_policy() -> None:
    terms = {"sdpo": lambda: scalar(2.0)}
    found = step_loss(terms, WEIGHTS, others=[scalar(3.0), scalar(4.0)])
    assert {name: loss.item() for name, loss in found.by_channel().items()} == {
        "policy": 7,
        "sdpo": 1,
    }
    assert found.total().item() == 8
    assert list(found.losses) == ["sdpo"]


def test_a_channel_without_data_is_no_part_of_the_graph_and_is_off() -> None:
    found = summed(policy=scalar(1.0), sdpo=None)
    assert found.losses.keys() == found.weighted.keys() == {"policy"}
    metrics = step_metrics({"policy": 1.0}, {"policy": 1.0, "sdpo": 0.5})
    assert metrics == {"loss/total": 1.0, "loss/policy": 1.0, "loss/sdpo": None}


def test_the_metrics_hold_unweighted_losses_and_null_for_what_is_off() -> None:
    sums = StepSums()
    sums.add({"policy": torch.tensor(1.0), "sdpo": torch.tensor(7.0), "replay": torch.tensor(1.0)})
    sums.add({"replay": torch.tensor(2.0)})
    assert sums.metrics({"policy": 1.0, "sdpo": 0.0, "replay": 2.0, "other": 1.0}) == {
        "loss/total": 7.0,
        "loss/policy": 1.0,
        "loss/sdpo": None,
        "loss/replay": 3.0,
        "loss/other": None,
    }


def test_the_reported_losses_are_detached() -> None:
    found = summed(policy=scalar(1.0), sdpo=scalar(1.0), replay=scalar(1.0))
    assert not any(loss.requires_grad for loss in found.losses.values())


def test_a_step_without_any_channel_has_a_zero_that_can_be_differentiated() -> None:
    found = summed(policy=None)
    found.total().backward()
    assert found.total().item() == 0
    assert step_metrics({}, {"policy": 1.0})["loss/total"] == 0


def test_the_totals_of_microbatches_add_up_with_channels_off_in_some() -> None:
    parts = [
        summed(policy=scalar(1.0), sdpo=scalar(2.0)),
        summed(policy=None, sdpo=scalar(4.0), replay=scalar(8.0)),
    ]
    whole = summed(policy=scalar(1.0), sdpo=scalar(6.0), replay=scalar(8.0))
    assert sum(part.total().item() for part in parts) == whole.total().item()


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_an_impossible_weight_is_named_with_its_bound(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight of sdpo is .* finite and >= 0: set it to 0"):
        summed({"sdpo": weight}, sdpo=scalar(1.0))


def files_with(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The files with one of some words, parsed."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path, ast.parse(text)


def calls(module: ast.Module) -> set[str]:
    """The names of the functions that a module calls."""
    called = (node.func for node in ast.walk(module) if type(node) is ast.Call)
    return {node.id for node in called if isinstance(node, ast.Name)}


def test_every_kind_of_step_calls_the_one_function() -> None:
    """The trainer, the harness, TRL, verl, AReaL, clients and the server's loss for them."""
    files = files_with("step_loss")
    found = {str(path.relative_to(ROOT)) for path, one in files if "step_loss" in calls(one)}
    there = CALLERS_IN_PLUGINS if (ROOT / "plugins").is_dir() else set()
    assert found == CALLERS | there


def is_weight(node: ast.expr) -> bool:
    """Whether an expression is the weight of a channel: alpha or beta of a config or step."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("alpha", "beta", "alpha_sdpo", "beta_replay")


def test_no_other_code_weights_the_loss_of_a_channel() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path, module in files_with("alpha", "beta")
        for node in ast.walk(module)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (is_weight(node.left) or is_weight(node.right))
    }
    assert not found


NORMS = {"policy": 1.0, "sdpo": 2.0, "replay": 1.0}


def test_shares_are_norms_over_their_sum_and_undefined_without_a_gradient() -> None:
    assert update_shares(NORMS) == {"policy": 0.25, "sdpo": 0.5, "replay": 0.25}
    assert update_shares({"policy": 0.0, "sdpo": 0.0}) == {}


def test_a_share_above_its_bound_is_lowered_to_it_exactly() -> None:
    # 1/3 of the update: the two others have 2 together, so that the channel has 1 of 3.
    factors = bounded_factors(NORMS, {"sdpo": (0.0, 1 / 3)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 0.5, "replay": 1}, rel=1e-15)


def test_a_share_below_its_bound_is_raised_to_it_exactly() -> None:
    factors = bounded_factors(NORMS, {"replay": (0.5, 1.0)})
    assert factors == {"policy": 1.0, "sdpo": 1.0, "replay": 3.0}


def test_shares_within_their_bounds_change_nothing() -> None:
    found = bounded_factors(NORMS, {"sdpo": (0.1, 0.6), "replay": (0.25, 0.25)})
    assert found == dict.fromkeys(NORMS, 1.0)


def test_a_lower_bound_of_one_channel_does_not_raise_one_that_was_above_its_upper_bound() -> None:
    norms = {"policy": 0.4, "sdpo": 0.5, "replay": 0.1}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.45), "replay": (0.4, 1.0)})
    shares = update_shares({name: factors[name] * norm for name, norm in norms.items()})
    assert factors["sdpo"] == 1.0
    assert shares["replay"] == pytest.approx(0.4)
    assert shares["sdpo"] < 0.45


def test_factors_are_the_least_that_keep_all_bounds() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        norms = {name: 10 ** rng.uniform(-6, 3) for name in NORMS}
        bounds = {}
        for name in ("sdpo", "replay"):
            low, high = sorted((rng.choice([0.0, rng.random() * 0.49]), rng.uniform(0.05, 1)))
            bounds[name] = (min(low, 0.49), high)
        factors = bounded_factors(norms, bounds)
        scaled = {name: factors[name] * norm for name, norm in norms.items()}
        total = math.fsum(scaled.values())
        assert factors["policy"] == 1
        for name, (low, high) in bounds.items():
            share = scaled[name] / total
            assert low * (1 - 1e-9) <= share <= high * (1 + 1e-9)
            if factors[name] > 1 + 1e-12:
                assert share == pytest.approx(low, rel=1e-9)
            if factors[name] < 1 - 1e-12:
                assert share == pytest.approx(high, rel=1e-9)


def test_without_a_policy_gradient_the_bounds_hold_among_the_other_channels() -> None:
    norms = {"policy": 0.0, "sdpo": 3.0, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.1), "replay": (0.5, 1.0)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1 / 27, "replay": 1}, rel=1e-12)


def test_upper_bounds_that_leave_room_for_the_policy_become_shares_of_each_other() -> None:
    norms = {"policy": 0.0, "sdpo": 0.1, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.35), "replay": (0.0, 0.3)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1, "replay": 0.1 * 30 / 35}, rel=1e-12)


def test_a_channel_that_is_alone_keeps_its_update() -> None:
    norms = {"policy": 0.0, "sdpo": 3.0, "replay": 0.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.35), "replay": (0.0, 0.3)})
    assert factors == pytest.approx(dict.fromkeys(norms, 1.0), rel=1e-12)


def test_a_channel_without_a_gradient_cannot_be_raised() -> None:
    norms = {"policy": 1.0, "sdpo": 0.0, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.5, 1.0), "replay": (0.0, 0.25)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1, "replay": 1 / 3}, rel=1e-15)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_none_is_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="the norm of sdpo is"):
        bounded_factors({"policy": 1.0, "sdpo": broken}, {"sdpo": (0.1, 0.5)})


@pytest.mark.parametrize("ends", [(0.6, 0.5), (-0.1, 0.5), (0.0, 0.0), (0.1, 1.1)])
def test_bounds_that_are_no_shares_are_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="the bounds of sdpo"):
        bounded_factors(NORMS, {"sdpo": ends})


def test_lower_bounds_that_leave_nothing_to_the_policy_are_refused() -> None:
    for low, other in itertools.product((0.5, 0.7), (0.5, 0.3)):
        if low + other >= 1:
            with pytest.raises(ValueError, match="lower bounds add up"):
                bounded_factors(NORMS, {"sdpo": (low, 1.0), "replay": (other, 1.0)})
