"""The outer optimizers against torch's, and their states as bytes.

Gradients in 8 and 4 bits: sizes, errors within half a scale, and error feedback over 50 rounds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from composer_mesh.configs.islands import OuterAdam, OuterConfig, OuterSgd
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    LIMITS,
    Quantization,
    decode,
    encode,
    first_state,
    make_outer,
    outer_gradient,
    payload_bytes,
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


HOW: tuple[Quantization, ...] = ("none", "int8", "int4")


def half_a_step(values: np.ndarray, how: Quantization) -> float:
    return 0.0 if how == "none" or not values.size else float(abs(values).max()) / LIMITS[how] / 2


@pytest.mark.parametrize("how", HOW)
@given(size=some.integers(0, 1000), seed=some.integers(0, 99), scale=some.floats(1e-20, 1e8))
def test_values_come_back_within_half_a_step(
    how: Quantization, size: int, seed: int, scale: float
) -> None:
    values = (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)

    encoded = encode(values, how)
    read = decode(encoded.payload, size, how)

    assert len(encoded.payload) == payload_bytes(size, how)
    assert (read == encoded.values).all()
    assert (np.abs(read - values) <= 1.0001 * half_a_step(values, how)).all()


def test_bytes_of_a_value() -> None:
    assert [payload_bytes(256 * 100, how) for how in HOW] == [102_400, 26_000, 13_200]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38, -2e9])
def test_values_that_are_not_finite_or_too_large_are_refused(how: Quantization, bad: float) -> None:
    payload = bytearray(encode(np.ones(300, np.float32), how).payload)
    payload[:4] = np.float32(bad).tobytes()

    with pytest.raises(ValueError, match="not finite"):
        decode(bytes(payload), 300, how)


def test_a_payload_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 bytes but 40 are its values"):
        decode(b"abc", 10, "none")


@pytest.mark.parametrize("how", ["int8", "int4"])
@pytest.mark.parametrize("config", [OuterSgd(lr=1.0, momentum=0.0), OuterSgd()])
def test_50_rounds_with_error_feedback_stay_within_the_stated_bound(
    how: Quantization, config: OuterSgd
) -> None:
    """The errors of earlier rounds cancel: lr / (1 - momentum) times the largest error is left."""
    random = np.random.default_rng(1)
    outer = make_outer(config)
    exact = rounded = first_state(random.standard_normal(1000).astype(np.float32), outer)
    common = residual = np.zeros(1000, np.float32)
    largest = 0.0

    for _ in range(50):
        gradient = (random.standard_normal(1000) * 0.1).astype(np.float32)
        exact = outer.step(exact, gradient)
        largest = max(largest, half_a_step(gradient + residual, how))
        sent = outer_gradient(common, common - gradient, residual, how)
        assert sent is not None
        assert sent.residual is not None
        residual = sent.residual
        rounded = outer.step(rounded, sent.values)

    bound = config.lr / (1 - config.momentum) * largest
    assert np.abs(rounded.weights - exact.weights).max() <= 1.001 * bound
