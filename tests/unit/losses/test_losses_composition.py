"""The sum of the channels, and what a channel that is off costs."""

import math

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.composition import compose


def scalar(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def test_the_total_is_the_weighted_sum_and_so_is_its_gradient() -> None:
    policy, sdpo, replay = scalar(1.0), scalar(10.0), scalar(100.0)
    found = compose(policy, sdpo, replay, alpha=0.5, beta=0.25)
    found.total.backward()
    assert found.total.item() == 1 + 5 + 25
    assert [x.grad.item() for x in (policy, sdpo, replay)] == [1, 0.5, 0.25]
    assert found.active == ("policy", "sdpo", "replay")
    assert found.off == ()


def test_a_channel_of_weight_zero_is_no_part_of_the_graph_and_is_off() -> None:
    policy, sdpo = scalar(1.0), scalar(math.nan)
    found = compose(policy, sdpo, None, alpha=0, beta=1)
    found.total.backward()
    assert found.total.item() == 1
    assert sdpo.grad is None
    assert found.off == ("sdpo", "replay")


def test_the_metrics_hold_unweighted_losses_and_null_for_what_is_off() -> None:
    found = compose(scalar(1.0), None, scalar(3.0), alpha=1, beta=2)
    assert found.metrics() == {
        "loss/total": 7.0,
        "loss/policy": 1.0,
        "loss/sdpo": None,
        "loss/replay": 3.0,
    }


def test_the_reported_losses_are_detached() -> None:
    found = compose(scalar(1.0), scalar(1.0), scalar(1.0), alpha=1, beta=1)
    assert not any(loss.requires_grad for loss in (found.policy, found.sdpo, found.replay))


def test_a_step_without_any_channel_has_a_zero_that_can_be_differentiated() -> None:
    found = compose(None, None, None, alpha=1, beta=1)
    found.total.backward()
    assert found.total.item() == 0
    assert found.active == ()


def test_the_totals_of_microbatches_add_up_with_channels_off_in_some() -> None:
    parts = [
        compose(scalar(1.0), scalar(2.0), None, alpha=0.5, beta=0.5),
        compose(None, scalar(4.0), scalar(8.0), alpha=0.5, beta=0.5),
    ]
    whole = compose(scalar(1.0), scalar(6.0), scalar(8.0), alpha=0.5, beta=0.5)
    assert sum(part.total.item() for part in parts) == whole.total.item()


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_an_impossible_weight_is_named_with_its_bound(weight: float) -> None:
    with pytest.raises(ValueError, match=r"alpha is .* finite and >= 0: set alpha to 0"):
        compose(scalar(1.0), None, None, alpha=weight, beta=0)
    with pytest.raises(ValueError, match=r"beta is .* finite and >= 0: set beta to 0"):
        compose(scalar(1.0), None, None, alpha=0, beta=weight)
