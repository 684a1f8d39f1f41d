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
    loss = getattr(preference, case["function"])(**inputs, **case["settings"]).loss
    gradients = torch.autograd.grad(loss, answers)
    expected = torch.tensor(case["loss"], dtype=dtype)
    torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
    for found, name in zip(gradients, ("chosen", "rejected"), strict=True):
        wanted = tensor(case["gradients"][name], dtype)
        torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["advantages", "preference"])
def test_each_function_of_the_family_has_a_stored_case(family: str) -> None:
    stored = {param.values[0]["function"] for param in cases(family)}
    module = {"advantages": advantages, "preference": preference}[family]
    public = [name for name in dir(module) if name.endswith(("_loss", "_advantages"))]
    assert set(public) - stored <= {"remax_advantages"}  # verl has the form on tokens only
