"""Our fused losses have the values and gradients of Liger-Kernel's: `make test-liger`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

LOSSES: Any = importlib.import_module("gpu_losses")
PARTS: Any = importlib.import_module("gpu_parts")
CPU = torch.device("cpu")
WITH_TWIN = [name for name in LOSSES.CASES if LOSSES.has_twin(name, CPU)]


@pytest.fixture
def inputs() -> Any:
    bench = PARTS.Bench(CPU, PARTS.DRY, PARTS.Limits(1.0, 1.0, 1.0, 1.0), "sdpa")
    return LOSSES.Inputs.random(bench, vocabulary=96)


@pytest.mark.parametrize("name", WITH_TWIN)
def test_a_loss_has_the_value_and_gradients_of_ligers(name: str, inputs: Any) -> None:
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed: `make test-liger`")
    ours, theirs, _ = LOSSES.CASES[name]
    assert LOSSES.difference(ours, theirs, inputs) < LOSSES.TOLERANCE[torch.float32]


def test_the_difference_of_losses_is_that_of_values_or_of_gradients(inputs: Any) -> None:
    def larger(one: Any) -> Any:
        return 1.01 * LOSSES.our_jsd(one)

    def steeper(one: Any) -> Any:
        return 2 * LOSSES.our_jsd(one) - LOSSES.our_jsd(one).detach()

    assert LOSSES.difference(LOSSES.our_jsd, LOSSES.our_jsd, inputs) == 0
    assert LOSSES.difference(larger, LOSSES.our_jsd, inputs) == pytest.approx(0.01, rel=1e-2)
    assert LOSSES.difference(steeper, LOSSES.our_jsd, inputs) == pytest.approx(1.0, rel=1e-3)
