"""Every distillation loss against recorded results of the published code, loss and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from upstream_cases import DISTILLATION, check_distillation, distillation_cases

from composer_mesh.losses import distillation

CASES = [
    pytest.param(group, case, id=f"{group['function']}-{number}")
    for number, (group, case) in enumerate(distillation_cases())
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("group", "case"), CASES)
def test_loss_and_gradient_are_those_of_the_published_code(
    group: dict[str, Any], case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_distillation(group, case, dtype)


@pytest.mark.parametrize("case", DISTILLATION["schedule"]["cases"])
def test_the_taid_schedule_is_that_of_the_published_code(case: dict[str, Any]) -> None:
    schedule = distillation.TaidSchedule(**case["settings"])
    steps = len(case["losses"])
    found = [schedule.update(loss, step, steps) for step, loss in enumerate(case["losses"])]
    rtol, _ = DISTILLATION["schedule"]["tolerance"]
    assert found == pytest.approx(case["t"], rel=rtol)


def test_every_loss_has_recorded_cases() -> None:
    losses = {name for name in distillation.__all__ if name.endswith(("_loss", "_jsd", "_kl"))}
    recorded = {group["function"] for group in DISTILLATION["losses"]}
    ours_alone = {"entropy_gated_kl"}
    assert losses - ours_alone <= recorded
