"""8 and 4 bits: sizes, errors within half a scale, and error feedback over 50 rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from composer_mesh.configs.islands import OuterSgd
from composer_mesh.plugins.islands.rounds.outer_gradient import outer_gradient
from composer_mesh.plugins.islands.rounds.outer_optimizer import first_state, make_outer
from composer_mesh.plugins.islands.rounds.quantization import (
    Quantization,
    decode,
    encode,
    largest_error,
    payload_bytes,
)

HOW: tuple[Quantization, ...] = ("none", "int8", "int4")


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
    assert (np.abs(read - values) <= 1.0001 * largest_error(values, how)).all()


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
        largest = max(largest, largest_error(gradient + residual, how))
        sent = outer_gradient(common, common - gradient, residual, how)
        assert sent is not None
        assert sent.residual is not None
        residual = sent.residual
        rounded = outer.step(rounded, sent.values)

    bound = config.lr / (1 - config.momentum) * largest
    assert np.abs(rounded.weights - exact.weights).max() <= 1.001 * bound
