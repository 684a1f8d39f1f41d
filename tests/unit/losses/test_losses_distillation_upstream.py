"""Every distillation loss against recorded results of the published code, loss and gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses import distillation

RECORDED = json.loads((Path(__file__).parent / "upstream" / "distillation.json").read_text())
CASES = [
    pytest.param(group, case, id=f"{group['function']}-{index}-{number}")
    for index, group in enumerate(RECORDED["losses"])
    for number, case in enumerate(group["cases"])
]


def tensors(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Lists become tensors: of bool for masks, of int for ids, of `dtype` for the rest."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, list):
            tensor = torch.tensor(value)
            floating = tensor.is_floating_point()
            value = torch.tensor(value, dtype=dtype if floating else tensor.dtype)
        found[name] = value
    return found


def run(group: dict[str, Any], case: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    arguments = tensors(case["arguments"], dtype)
    for name in case["gradients"]:
        arguments[name].requires_grad_()
    loss = getattr(distillation, group["function"])(**arguments)
    loss.backward()
    return {"loss": loss.detach()} | {name: arguments[name].grad for name in case["gradients"]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("group", "case"), CASES)
def test_loss_and_gradient_are_those_of_the_published_code(
    group: dict[str, Any], case: dict[str, Any], dtype: torch.dtype
) -> None:
    rtol, atol = group["tolerance"] if dtype == torch.float64 else (5e-5, 2e-6)
    expected = {"loss": case["loss"]} | case["gradients"]
    for name, found in run(group, case, dtype).items():
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", RECORDED["schedule"]["cases"])
def test_the_taid_schedule_is_that_of_the_published_code(case: dict[str, Any]) -> None:
    schedule = distillation.TaidSchedule(**case["settings"])
    steps = len(case["losses"])
    found = [schedule.update(loss, step, steps) for step, loss in enumerate(case["losses"])]
    rtol, _ = RECORDED["schedule"]["tolerance"]
    assert found == pytest.approx(case["t"], rel=rtol)


def test_every_loss_has_recorded_cases() -> None:
    losses = {name for name in distillation.__all__ if name.endswith(("_loss", "_jsd", "_kl"))}
    recorded = {group["function"] for group in RECORDED["losses"]}
    ours_alone = {"entropy_gated_kl"}
    assert losses - ours_alone <= recorded
