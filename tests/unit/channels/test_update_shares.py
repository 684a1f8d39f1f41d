"""Bounds of shares: exact factors, the smallest change that keeps them, clear refusals."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from composer_mesh.channels.weights import bounded_factors, update_shares

NORMS = {"policy": 1.0, "sdpo": 2.0, "replay": 1.0}


def test_shares_are_norms_over_their_sum_and_undefined_without_a_gradient() -> None:
    assert update_shares(NORMS) == {"policy": 0.25, "sdpo": 0.5, "replay": 0.25}
    assert update_shares({"policy": 0.0, "sdpo": 0.0}) == {}


def test_a_share_above_its_bound_is_lowered_to_it_exactly() -> None:
    # 1/3 of the update: the two others have 2 together, so that the channel has 1 of 3.
    factors = bounded_factors(NORMS, {"sdpo": (0.0, 1 / 3)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 0.5, "replay": 1}, rel=1e-15)


def test_a_share_below_its_bound_is_raised_to_it_exactly() -> None:
    factors = bounded_factors(NORMS, {"replay": (0.5, 1.0)})
    assert factors == {"policy": 1.0, "sdpo": 1.0, "replay": 3.0}


def test_shares_within_their_bounds_change_nothing() -> None:
    found = bounded_factors(NORMS, {"sdpo": (0.1, 0.6), "replay": (0.25, 0.25)})
    assert found == dict.fromkeys(NORMS, 1.0)


def test_a_lower_bound_of_one_channel_does_not_raise_one_that_was_above_its_upper_bound() -> None:
    norms = {"policy": 0.4, "sdpo": 0.5, "replay": 0.1}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.45), "replay": (0.4, 1.0)})
    shares = update_shares({name: factors[name] * norm for name, norm in norms.items()})
    assert factors["sdpo"] == 1.0
    assert shares["replay"] == pytest.approx(0.4)
    assert shares["sdpo"] < 0.45


def test_factors_are_the_least_that_keep_all_bounds() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        norms = {name: 10 ** rng.uniform(-6, 3) for name in NORMS}
        bounds = {}
        for name in ("sdpo", "replay"):
            low, high = sorted((rng.choice([0.0, rng.random() * 0.49]), rng.uniform(0.05, 1)))
            bounds[name] = (min(low, 0.49), high)
        factors = bounded_factors(norms, bounds)
        scaled = {name: factors[name] * norm for name, norm in norms.items()}
        total = math.fsum(scaled.values())
        assert factors["policy"] == 1
        for name, (low, high) in bounds.items():
            share = scaled[name] / total
            assert low * (1 - 1e-9) <= share <= high * (1 + 1e-9)
            if factors[name] > 1 + 1e-12:
                assert share == pytest.approx(low, rel=1e-9)
            if factors[name] < 1 - 1e-12:
                assert share == pytest.approx(high, rel=1e-9)


def test_without_a_policy_gradient_there_is_nothing_to_be_a_share_of() -> None:
    norms = {"policy": 0.0, "sdpo": 3.0, "replay": 1.0}
    bounds = {"sdpo": (0.0, 0.1), "replay": (0.5, 1.0)}
    assert bounded_factors(norms, bounds) == dict.fromkeys(norms, 1.0)


def test_a_channel_without_a_gradient_cannot_be_raised() -> None:
    norms = {"policy": 1.0, "sdpo": 0.0, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.5, 1.0), "replay": (0.0, 0.25)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1, "replay": 1 / 3}, rel=1e-15)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_none_is_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="the norm of sdpo is"):
        bounded_factors({"policy": 1.0, "sdpo": broken}, {"sdpo": (0.1, 0.5)})


@pytest.mark.parametrize("ends", [(0.6, 0.5), (-0.1, 0.5), (0.0, 0.0), (0.1, 1.1)])
def test_bounds_that_are_no_shares_are_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="the bounds of sdpo"):
        bounded_factors(NORMS, {"sdpo": ends})


def test_lower_bounds_that_leave_nothing_to_the_policy_are_refused() -> None:
    for low, other in itertools.product((0.5, 0.7), (0.5, 0.3)):
        if low + other >= 1:
            with pytest.raises(ValueError, match="lower bounds add up"):
                bounded_factors(NORMS, {"sdpo": (low, 1.0), "replay": (other, 1.0)})
