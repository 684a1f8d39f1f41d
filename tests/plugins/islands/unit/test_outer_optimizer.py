"""The outer optimizers against torch's, and their states as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composer_mesh.configs.islands import OuterAdam, OuterConfig, OuterSgd
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    first_state,
    make_outer,
    state_bytes,
    state_of,
)

ADAM = OuterAdam(type="adam", lr=0.01)
CASES = [
    (OuterSgd(), lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True)),
    (OuterSgd(nesterov=False), lambda p: torch.optim.SGD(p, 0.7, 0.9)),
    (OuterSgd(lr=1.0, momentum=0.0), lambda p: torch.optim.SGD(p, 1.0)),
    (ADAM, lambda p: torch.optim.Adam(p, 0.01, (0.9, 0.95), 1e-8)),
]


@pytest.mark.parametrize(("config", "make"), CASES)
def test_rounds_equal_steps_of_torch(config: OuterConfig, make: object) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal(50).astype(np.float32)
    expected = torch.nn.Parameter(torch.tensor(weights))
    theirs = make([expected])  # type: ignore[operator]
    outer = make_outer(config)
    state = first_state(weights, outer)

    for _ in range(20):
        gradient = random.standard_normal(50).astype(np.float32)
        expected.grad = torch.tensor(gradient)
        theirs.step()
        state = outer.step(state, gradient)

    assert state.round == 20
    np.testing.assert_allclose(state.weights, expected.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("config", "_make"), CASES)
def test_a_state_is_restored_bit_for_bit(config: OuterConfig, _make: object) -> None:
    outer = make_outer(config)
    state = outer.step(first_state(np.ones(7, np.float32), outer), np.full(7, 0.1, np.float32))

    again = state_of(1, state_bytes(state), 7, outer)

    assert (again.weights == state.weights).all()
    assert [one.tolist() for one in again.slots] == [one.tolist() for one in state.slots]


def test_a_state_of_another_size_is_refused() -> None:
    outer = make_outer(OuterSgd())
    data = state_bytes(first_state(np.ones(7, np.float32), outer))

    with pytest.raises(ValueError, match="14 numbers is not one of 8 weights"):
        state_of(1, data, 8, outer)
