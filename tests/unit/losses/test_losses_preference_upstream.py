"""Advantages and preference losses against what the published code computed.

`upstream/advantages.json` and `upstream/preference.json` hold inputs in float64 and the results of
the upstream functions that each case names; null stands for NaN.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses import advantages, preference
from composer_mesh.losses.policy import token_logprobs

UPSTREAM = Path(__file__).parent / "upstream"
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 5e-5, "atol": 2e-6},
}


def cases(family: str) -> list[Any]:
    stored = json.loads((UPSTREAM / f"{family}.json").read_text())["cases"]
    return [
        pytest.param(case, id=f"{i}-{case['function']}-{case['source'].split('@')[0]}")
        for i, case in enumerate(stored)
    ]


def tensors(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor(values, dtype) for name, values in case["inputs"].items()}


def tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
    """A tensor of the dtype; of counts and masks what they are."""

    found = torch.tensor(nan_for_null(values))
    if not found.is_floating_point():
        return found
    return torch.tensor(nan_for_null(values), dtype=dtype)


def nan_for_null(value: Any) -> Any:
    if isinstance(value, list):
        return [nan_for_null(v) for v in value]
    return float("nan") if value is None else value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    found = getattr(advantages, case["function"])(**tensors(case, dtype), **case["settings"])
    torch.testing.assert_close(found, tensor(case["expected"], dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", cases("preference"))
def test_preference_losses_and_gradients_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    inputs = tensors(case, dtype)
    answers = [inputs[name].requires_grad_() for name in ("chosen", "rejected")]
    result = getattr(preference, case["function"])(**inputs, **case["settings"])
    loss = result.loss
    gradients = torch.autograd.grad(loss, answers)
    expected = torch.tensor(case["loss"], dtype=dtype)
    torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
    for found, name in zip(gradients, ("chosen", "rejected"), strict=True):
        wanted = tensor(case["gradients"][name], dtype)
        torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])
    for name, value in case.get("rewards", {}).items():
        wanted = torch.tensor(value, dtype=dtype)
        torch.testing.assert_close(getattr(result, name), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    "case", json.loads((UPSTREAM / "preference_tokens.json").read_text())["cases"]
)
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
    "remax_advantages",  # verl has the form on tokens only
    # Computed by hand in test_losses_turn_advantages.
    *("turn_return_advantages", "mt_grpo_advantages", "gigpo_advantages"),
}


@pytest.mark.parametrize("family", ["advantages", "preference"])
def test_each_function_of_the_family_has_a_stored_case(family: str) -> None:
    stored = {param.values[0]["function"] for param in cases(family)}
    module = {"advantages": advantages, "preference": preference}[family]
    public = [name for name in dir(module) if name.endswith(("_loss", "_advantages"))]
    assert set(public) - stored <= NOT_STORED
