"""Advantages and preference losses against what the published code computed.

`upstream/advantages.json` and `upstream/preference.json` hold inputs in float64 and the results of
the upstream functions that each case names; null stands for NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repetition import repeated
from upstream_cases import TOLERANCES, check_advantages, check_preference, stored

from composer_mesh.losses import advantages, preference
from composer_mesh.losses.policy import token_logprobs


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
    # Computed by hand in test_losses_turn_advantages.
    *("turn_return_advantages", "mt_grpo_advantages", "gigpo_advantages"),
}


@pytest.mark.parametrize("family", ["advantages", "preference"])
def test_each_function_of_the_family_has_a_stored_case(family: str) -> None:
    stored = {param.values[0]["function"] for param in cases(family)}
    module = {"advantages": advantages, "preference": preference}[family]
    public = [name for name in dir(module) if name.endswith(("_loss", "_advantages"))]
    assert set(public) - stored <= NOT_STORED
