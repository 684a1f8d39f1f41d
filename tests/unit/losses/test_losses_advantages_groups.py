"""Advantages of rollouts against loops over their definitions, and their invariants."""

import inspect
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.advantages import (
    gpg_advantages,
    group_advantages,
    max_rl_advantages,
    opo_advantages,
    rloo_advantages,
)

TIGHT = {"rtol": 1e-9, "atol": 1e-12}
OF_A_GROUP = {
    "group_std": group_advantages,
    "batch_std": lambda r, **kw: group_advantages(r, scale="batch", **kw),
    "group_mean": lambda r, **kw: group_advantages(r, scale="none", **kw),
    "rloo": rloo_advantages,
    "max_rl": max_rl_advantages,
    "gpg": gpg_advantages,
    "opo": lambda r, **kw: opo_advantages(r, 1 + r.nan_to_num().abs(), **kw),
}


def rewards(groups: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(groups, size, generator=rng, dtype=torch.float64)


def some_missing(groups: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    """At least two rollouts of each group are present, and not all are."""
    present = torch.rand(groups, size, generator=torch.Generator().manual_seed(seed)) < 0.6
    present[:, :2], present[:, 2] = True, False
    return present


def test_population_std_divides_by_the_count() -> None:
    values = rewards()
    found = group_advantages(values, eps=1e-6, std="population")
    for row, group in zip(found.tolist(), values.tolist(), strict=True):
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        assert row == pytest.approx([(r - mean) / (deviation + 1e-6) for r in group], rel=1e-9)


def test_scale_batch_divides_what_the_group_centres_by_the_std_of_all_rewards() -> None:
    values = rewards()
    deviation = statistics.stdev(values.flatten().tolist())
    expected = (values - values.mean(-1, keepdim=True)) / (deviation + 1e-4)
    torch.testing.assert_close(group_advantages(values, scale="batch"), expected, **TIGHT)


@given(seed=st.integers(0, 2**16), size=st.integers(2, 7))
@settings(max_examples=25, deadline=None)
def test_rloo_takes_the_mean_of_the_others_away(seed: int, size: int) -> None:
    values = rewards(2, size, seed)
    for row, group in zip(rloo_advantages(values).tolist(), values.tolist(), strict=True):
        others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(size)]
        assert row == pytest.approx(
            [r - o for r, o in zip(group, others, strict=True)], rel=1e-9, abs=1e-12
        )


def test_max_rl_weighs_a_rare_success_by_how_rare_it_is() -> None:
    found = max_rl_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]))
    assert found.tolist() == [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0]]


def test_max_rl_gives_no_signal_to_a_group_whose_mean_is_not_positive() -> None:
    found = max_rl_advantages(torch.tensor([[0.0, 0.0], [-1.0, 1.0], [-3.0, 1.0]]))
    assert torch.equal(found, torch.zeros(3, 2))


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_ragged_group_is_scored_as_if_the_missing_were_not_there(name: str) -> None:
    values, present = rewards(), some_missing()
    function = OF_A_GROUP[name]
    found = function(torch.where(present, values, math.nan), present=present)
    assert torch.equal(found[~present], torch.zeros_like(found[~present]))
    if name == "batch_std":
        deviation = statistics.stdev(values[present].tolist()) + 1e-4
        alone = [(v[p] - v[p].mean()) / deviation for v, p in zip(values, present, strict=True)]
    else:
        alone = [function(v[p]) for v, p in zip(values, present, strict=True)]
    torch.testing.assert_close(found[present], torch.cat(alone), **TIGHT)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_equal_rewards_get_exactly_zero(name: str) -> None:
    for value in (0.1, 1 / 3, -7.7):
        for dtype in (torch.float32, torch.float64):
            found = OF_A_GROUP[name](torch.full((2, 7), value, dtype=dtype))
            assert torch.equal(found, torch.zeros(2, 7, dtype=dtype))


def test_a_group_of_one_is_zero_or_raw_as_asked() -> None:
    one = torch.tensor([[3.0]])
    assert group_advantages(one).item() == 0
    assert group_advantages(one, scale="none", singleton="raw").item() == 3
    assert group_advantages(one, eps=0.5, singleton="raw").item() == 2
    assert rloo_advantages(one).item() == 3
    assert rloo_advantages(one, singleton="zero").item() == 0
    assert max_rl_advantages(one).item() == 0


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_the_order_of_rollouts_and_prompts_does_not_matter(name: str) -> None:
    values = rewards(4, 6, seed=3)
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 1, 0, 4, 2, 3])
    shuffled = OF_A_GROUP[name](values[rows][:, columns])
    torch.testing.assert_close(shuffled, OF_A_GROUP[name](values)[rows][:, columns], **TIGHT)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_advantages_carry_no_gradient_and_the_dtype_of_their_rewards(name: str) -> None:
    values = rewards().requires_grad_()
    found = OF_A_GROUP[name](values)
    assert not found.requires_grad
    assert found.dtype == torch.float64
    single = OF_A_GROUP[name](values.float())
    torch.testing.assert_close(single.double(), found, rtol=5e-5, atol=2e-6)
    assert OF_A_GROUP[name](values.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", OF_A_GROUP)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 3)])
def test_nothing_to_score_stays_nothing(name: str, shape: tuple[int, ...]) -> None:
    assert OF_A_GROUP[name](torch.zeros(shape)).shape == shape
    assert OF_A_GROUP[name](torch.zeros(2, 3), present=torch.zeros(2, 3).bool()).sum() == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "std"}, "kind is 'std': use 'group_std' or 'group_mean'"),
        ({"std": "biased"}, "std is 'biased': use 'unbiased' or 'population'"),
        ({"scale": "row"}, "scale is 'row': use 'group', 'batch' or 'none'"),
        ({"singleton": "one"}, "singleton is 'one': use 'zero' or 'raw'"),
    ],
)
def test_an_unknown_convention_is_an_error_that_names_the_known_ones(
    changed: dict[str, str], message: str
) -> None:
    # Past the type checks of the tests, as a config would.
    unchecked = inspect.unwrap(group_advantages)
    with pytest.raises(ValueError, match=message):
        unchecked(rewards(), **changed)
