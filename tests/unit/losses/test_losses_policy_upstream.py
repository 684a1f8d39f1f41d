"""Policy losses against values and gradients that the published code gave for the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from upstream_cases import (
    POLICY,
    TOLERANCES,
    check_kl,
    check_policy,
    check_weights,
)

every_type = pytest.mark.parametrize("dtype", TOLERANCES)


def named(case: dict[str, Any]) -> str:
    return f"{case['source'].split()[0]} {case.get('function', 'weights')} {case['batch']}"


@every_type
@pytest.mark.parametrize("case", POLICY["cases"], ids=named)
def test_loss_and_gradient_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_policy(case, dtype)


@every_type
@pytest.mark.parametrize("case", POLICY["weights"], ids=named)
def test_sampling_weights_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_weights(case, dtype)


@every_type
@pytest.mark.parametrize("case", POLICY["kl"], ids=lambda case: case["source"].split()[-1])
def test_kl_estimates_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_kl(case, dtype)
