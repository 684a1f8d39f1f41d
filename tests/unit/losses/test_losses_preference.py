"""DPO against the scalar formula, its closed-form gradient and its invariants.

Advantages and preference losses against what the published code computed.

`upstream/advantages.json` and `upstream/preference.json` hold inputs in float64 and the results of
the upstream functions that each case names; null stands for NaN.

What the preference losses share: unreduced pairs, weights of pairs, lengths, and refusals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repetition import repeated
from torch import Tensor
from upstream_cases import TOLERANCES, check_advantages, check_preference, stored

from composer_mesh.losses import advantages, preference
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.losses.preference import (
    PreferenceLoss,
    collision_logprobs,
    dpo_loss,
    ipo_loss,
    mpo_loss,
    sequence_logprobs,
    simpo_loss,
    wpo_weights,
)


def pairs(n: int = 5, seed: int = 0) -> list[Tensor]:
    """Chosen, rejected, reference chosen and reference rejected log-probs, in float64."""
    rng = torch.Generator().manual_seed(seed)
    values = [-10 * torch.rand(n, generator=rng, dtype=torch.float64) for _ in range(4)]
    return [v.requires_grad_() for v in values[:2]] + values[2:]


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
        ({"beta": 0.0}, "dpo beta is 0.0 but must be > 0: use 0.1"),
        ({"label_smoothing": 0.5}, r"label_smoothing is 0.5 but must be in \[0, 0.5\)"),
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


COUNTS = (torch.tensor([3, 1, 4]), torch.tensor([2, 5, 1]))


def triple() -> list[Tensor]:
    """Chosen, rejected and their reference log-probs of three pairs, in float64."""
    rng = torch.Generator().manual_seed(5)
    values = [-8 * torch.rand(3, generator=rng, dtype=torch.float64) for _ in range(4)]
    return [v.requires_grad_() for v in values[:2]] + values[2:]


LOSSES: dict[str, Callable[..., PreferenceLoss]] = {
    "dpo": lambda v, **kw: dpo_loss(*v, **kw),
    "apo": lambda v, **kw: dpo_loss(*v, loss_type="apo_zero", **kw),
    "averages": lambda v, **kw: dpo_loss(*v, *COUNTS, **kw),
    "ipo": lambda v, **kw: ipo_loss(*v, *COUNTS, **kw),
    "mpo": lambda v, **kw: mpo_loss(*v, *COUNTS, **kw),
    "simpo": lambda v, **kw: simpo_loss(*v[:2], *COUNTS, **kw),
}


FIGURES = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward")


every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@every_loss
def test_unreduced_pairs_add_up_to_the_loss_and_its_figures(
    loss: Callable[..., PreferenceLoss],
) -> None:
    each, whole = loss(triple(), reduction="none"), loss(triple(), normalizer=7)
    for name in FIGURES:
        terms = getattr(each, name)
        assert terms.shape == (3,)
        torch.testing.assert_close(terms.sum() / 7, getattr(whole, name), rtol=1e-12, atol=1e-14)


@every_loss
def test_an_unreduced_pair_depends_on_its_own_answers_alone(
    loss: Callable[..., PreferenceLoss],
) -> None:
    values = triple()
    gradients = torch.autograd.grad(loss(values, reduction="none").loss[1], values[:2])
    for gradient in gradients:
        assert gradient[[0, 2]].tolist() == [0, 0]
        assert gradient[1] != 0


@every_loss
def test_a_sum_without_a_normalizer_is_refused(loss: Callable[..., PreferenceLoss]) -> None:
    with pytest.raises(ValueError, match="normalizer is None but reduction 'sum'"):
        loss(triple())


@every_loss
def test_weights_scale_the_loss_of_a_pair_and_no_figure(
    loss: Callable[..., PreferenceLoss],
) -> None:
    weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    plain = loss(triple(), reduction="none")
    weighted = loss(triple(), reduction="none", weights=weights)
    torch.testing.assert_close(weighted.loss, plain.loss * weights.detach())
    for name in FIGURES[1:]:
        assert torch.equal(getattr(weighted, name), getattr(plain, name))
    weighted.loss.sum().backward()
    assert weights.grad is None


@every_loss
def test_the_margin_is_the_difference_of_the_rewards(loss: Callable[..., PreferenceLoss]) -> None:
    found = loss(triple(), normalizer=3)
    torch.testing.assert_close(found.chosen_reward - found.rejected_reward, found.margin)


def test_the_rewards_of_dpo_are_scaled_log_ratios_whatever_the_divergence() -> None:
    chosen, rejected, reference_chosen, reference_rejected = triple()
    for options in ({}, {"f_divergence_type": "js_divergence"}):
        found = dpo_loss(*triple(), beta=0.3, reduction="none", **options)
        expected = 0.3 * (chosen - reference_chosen)
        torch.testing.assert_close(found.chosen_reward, expected.detach())
        expected = 0.3 * (rejected - reference_rejected)
        torch.testing.assert_close(found.rejected_reward, expected.detach())


def test_sigmoid_norm_is_sigmoid_with_lengths() -> None:
    by_name = dpo_loss(*triple(), *COUNTS, loss_type="sigmoid_norm", normalizer=3)
    assert torch.equal(by_name.loss, dpo_loss(*triple(), *COUNTS, normalizer=3).loss)


@pytest.mark.parametrize(("f_alpha", "same"), [(1.0, "reverse_kl"), (0.0, "forward_kl")])
def test_the_alpha_divergence_ends_in_reverse_and_forward_kl(f_alpha: float, same: str) -> None:
    found = dpo_loss(*triple(), f_divergence_type="alpha_divergence", f_alpha=f_alpha, normalizer=3)
    expected = dpo_loss(*triple(), f_divergence_type=same, normalizer=3)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_an_extreme_ratio_keeps_every_divergence_finite(kind: str, gap: float) -> None:
    chosen, zero = torch.tensor([gap], requires_grad=True), torch.zeros(1)
    found = dpo_loss(chosen, zero, zero, zero, f_divergence_type=kind, normalizer=1)
    found.loss.backward()
    assert found.loss.isfinite()
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize("ld_alpha", [0.0, 0.3, 1.0])
def test_ld_alpha_weighs_the_tokens_beyond_the_shorter_answer(ld_alpha: float) -> None:
    tokens = torch.tensor([[math.nan, -1.0, -2.0, -4.0], [-8.0, -16.0, math.nan, -32.0]])
    mask = torch.tensor([[False, True, True, True], [True, True, False, True]])
    found = sequence_logprobs(tokens, mask, ld_alpha=ld_alpha, shared_lengths=torch.tensor([1, 2]))
    expected = [-1 - ld_alpha * 6, -24 - ld_alpha * 32]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_wpo_weights_are_the_mean_advantage_over_the_collision_probability() -> None:
    logits = torch.tensor([[[0.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [0.0, 0.0]]])
    targets = torch.tensor([[0, 1], [1, 1]])
    mask = torch.tensor([[True, True], [False, False]])
    p = 1 / (1 + math.e)
    expected = math.sqrt(p / (p**2 + (1 - p) ** 2) * 1.0)
    found = wpo_weights(token_logprobs(logits, targets), collision_logprobs(logits), mask)
    assert found.tolist() == pytest.approx([expected, 1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "exo_pair"}, "label_smoothing is 0 but exo_pair takes its logarithm"),
        ({"loss_type": "apo_zero", "label_smoothing": 0.1}, "0.1 but apo_zero has none"),
        ({"loss_type": "sigmoid_norm"}, "sigmoid_norm is per token: pass chosen_lengths"),
        ({"chosen_lengths": COUNTS[0]}, "dpo has the lengths of one side only"),
        (
            {"loss_type": "apo_down", "f_divergence_type": "forward_kl"},
            "f_divergence_type is 'forward_kl' but loss_type 'apo_down' is defined on log-ratios",
        ),
    ],
)
def test_an_impossible_dpo_is_named_with_its_repair(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(*triple(), normalizer=3, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "sft is per token: pass chosen_lengths"),
        ({"loss_types": {}}, "loss_types is empty"),
        ({"loss_types": {"hinge": 1}, "label_smoothing": 0.1}, "0.1 but hinge have none"),
    ],
)
def test_an_impossible_mix_is_named_with_its_repair(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mpo_loss(*triple(), normalizer=3, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ld_alpha": 0.5}, "ld_alpha is 0.5 and shared_lengths are not given"),
        ({"shared_lengths": torch.tensor([1])}, "ld_alpha is None and shared_lengths are given"),
        ({"ld_alpha": 2.0, "shared_lengths": torch.tensor([1])}, r"ld_alpha is 2.0 but must be"),
    ],
)
def test_an_impossible_length_weight_is_named_with_its_repair(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sequence_logprobs(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), **change)
