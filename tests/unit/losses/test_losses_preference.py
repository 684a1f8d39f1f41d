"""DPO against the scalar formula, its closed-form gradient and its invariants.

Advantages and preference losses against what the published code computed.

`upstream/advantages.json` and `upstream/preference.json` hold inputs in float64 and the results of
the upstream functions that each case names; null stands for NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repetition import repeated
from torch import Tensor
from upstream_cases import TOLERANCES, check_advantages, check_preference, stored

from composer_mesh.losses import advantages, preference
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.losses.preference import dpo_loss, sequence_logprobs


def pairs(n: int = 5, seed: int = 0) -> list[Tensor]:
    """Chosen, rejected, reference chosen and reference rejected log-probs, in float64."""
    rng = torch.Generator().manual_seed(seed)
    values = [-10 * torch.rand(n, generator=rng, dtype=torch.float64) for _ in range(4)]
    return [v.requires_grad_() for v in values[:2]] + values[2:]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_value_and_gradient_agree_with_the_formula(beta: float, smoothing: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    found = dpo_loss(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        beta=beta,
        normalizer=8,
        label_smoothing=smoothing,
    )
    found.loss.backward()
    margins = [
        beta * ((c - rc) - (r - rr))
        for c, r, rc, rr in zip(*(x.tolist() for x in pairs()), strict=True)
    ]
    value = sum(
        -(1 - smoothing) * math.log(sigmoid(z)) - smoothing * math.log(sigmoid(-z)) for z in margins
    )
    assert found.loss.item() == pytest.approx(value / 8, rel=1e-9)
    assert found.margin.item() == pytest.approx(sum(margins) / 8, rel=1e-9)
    assert found.accuracy.item() == sum(z > 0 for z in margins) / 8
    slope = [beta * (smoothing * sigmoid(z) - (1 - smoothing) * sigmoid(-z)) / 8 for z in margins]
    assert chosen.grad.tolist() == pytest.approx(slope, rel=1e-9)
    assert rejected.grad.tolist() == pytest.approx([-x for x in slope], rel=1e-9)


def test_a_policy_equal_to_its_reference_loses_log_two_per_pair() -> None:
    chosen, rejected, _, _ = pairs()
    found = dpo_loss(chosen, rejected, chosen, rejected, beta=0.3, normalizer=5)
    assert found.loss.item() == pytest.approx(math.log(2))
    assert found.margin.item() == found.accuracy.item() == 0


@given(split=st.integers(0, 6), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_microbatch_losses_add_up_to_the_batch_loss(split: int, seed: int) -> None:
    values = pairs(6, seed)
    whole = dpo_loss(*values, beta=0.1, normalizer=6)
    first = dpo_loss(*(v[:split] for v in values), beta=0.1, normalizer=6)
    second = dpo_loss(*(v[split:] for v in values), beta=0.1, normalizer=6)
    for name in ("loss", "margin", "accuracy"):
        total = getattr(first, name) + getattr(second, name)
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-12, atol=1e-14)


def test_no_gradient_reaches_the_reference() -> None:
    values = [v.detach().requires_grad_() for v in pairs()]
    dpo_loss(*values, beta=0.1, normalizer=5).loss.backward()
    assert [v.grad is None for v in values] == [False, False, True, True]


def test_no_pairs_give_zero_with_a_graph() -> None:
    values = [torch.zeros(0, requires_grad=True) for _ in range(4)]
    found = dpo_loss(*values, beta=0.1, normalizer=0)
    found.loss.backward()
    assert found.loss.item() == found.margin.item() == found.accuracy.item() == 0
    assert values[0].grad.shape == (0,)


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_an_extreme_margin_keeps_loss_and_gradient_finite(gap: float) -> None:
    chosen = torch.tensor([gap], requires_grad=True)
    zero = torch.zeros(1)
    found = dpo_loss(chosen, zero, zero, zero, beta=1, normalizer=1)
    found.loss.backward()
    assert found.loss.item() == max(-gap, 0)
    assert chosen.grad.item() == (-1 if gap < 0 else 0)


def test_sequence_logprobs_sum_the_answer_and_ignore_the_rest_even_when_nan() -> None:
    tokens = torch.tensor([[-1.0, -2.0, math.nan], [math.nan, -4.0, -8.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, True]])
    found = sequence_logprobs(tokens, mask)
    found.sum().backward()
    assert found.tolist() == [-3.0, -8.0]
    assert torch.equal(tokens.grad, mask.float())


def test_an_answer_without_tokens_has_log_probability_zero() -> None:
    assert sequence_logprobs(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beta": 0.0}, "dpo beta is 0.0 but has to be > 0: use 0.1"),
        ({"label_smoothing": 0.5}, r"label_smoothing is 0.5 but has to be in \[0, 0.5\)"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(*pairs(), **{"normalizer": 5, **changed})


def cases(family: str) -> list[Any]:
    return [
        pytest.param(case, id=f"{i}-{case['function']}-{case['source'].split('@')[0]}")
        for i, case in enumerate(stored(family)["cases"])
    ]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_advantages(case, dtype)


@pytest.mark.parametrize("dtype", repeated(TOLERANCES), ids=str)
@pytest.mark.parametrize("case", cases("preference"))
def test_preference_losses_and_gradients_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_preference(case, dtype)


@pytest.mark.parametrize("case", stored("preference_tokens")["cases"])
def test_ld_dpo_and_wpo_on_whole_logits_are_those_of_the_published_code(
    case: dict[str, Any],
) -> None:
    logits = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["reference_logits"], dtype=torch.float64)
    targets, mask = torch.tensor(case["targets"]), torch.tensor(case["mask"])
    lengths = mask.sum(-1)
    ld = {}
    if case["ld_alpha"] is not None:
        shared = torch.minimum(*lengths.chunk(2)).repeat(2)
        ld = {"ld_alpha": case["ld_alpha"], "shared_lengths": shared}
    tokens = token_logprobs(logits, targets)
    sums = preference.sequence_logprobs(tokens, mask, **ld)
    frozen = preference.sequence_logprobs(token_logprobs(reference, targets), mask, **ld)
    weights = None
    if case["use_weighting"]:
        collisions = preference.collision_logprobs(logits)
        weights = torch.mul(*preference.wpo_weights(tokens, collisions, mask).chunk(2))
    sides = (*sums.chunk(2), *frozen.chunk(2))
    options = {"beta": case["beta"], "normalizer": 2, "weights": weights}
    if case["loss_type"] == "ipo":
        found = preference.ipo_loss(*sides, *lengths.chunk(2), **options)
    else:
        found = preference.dpo_loss(*sides, loss_type=case["loss_type"], **options)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9)
    assert found.chosen_reward.item() == pytest.approx(case["chosen_reward"], rel=1e-9)
    wanted = torch.tensor(case["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-9, atol=1e-11)


NOT_STORED = {
    # Computed by hand in test_losses_advantages.
    *("turn_return_advantages", "mt_grpo_advantages", "gigpo_advantages"),
}


@pytest.mark.parametrize("family", ["advantages", "preference"])
def test_each_function_of_the_family_has_a_stored_case(family: str) -> None:
    stored = {param.values[0]["function"] for param in cases(family)}
    module = {"advantages": advantages, "preference": preference}[family]
    public = [name for name in dir(module) if name.endswith(("_loss", "_advantages"))]
    assert set(public) - stored <= NOT_STORED
