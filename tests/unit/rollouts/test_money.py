"""Amounts are whole nano-dollars, and rounding never favours the spender."""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.budget import (
    NANO,
    TEMPLATE_TOKENS,
    Prices,
    ceiling,
    dollars,
    nano,
)

AMOUNTS = st.decimals(0, 10**6, allow_nan=False, allow_infinity=False)
PRICES = st.builds(Prices, st.decimals(0, 1), st.decimals(0, 1), st.decimals(0, 1))
COUNTS = st.integers(0, 10**7)


@given(AMOUNTS)
def test_charges_round_up_and_ceilings_down_by_less_than_a_nano_dollar(usd: Decimal) -> None:
    exact = Fraction(usd) * NANO
    assert 0 <= nano(usd) - exact < 1
    assert 0 <= exact - ceiling(usd) < 1


@given(PRICES, COUNTS, COUNTS)
def test_a_cost_is_never_below_the_exact_one(prices: Prices, prompt: int, completion: int) -> None:
    exact = (
        Fraction(prices.prompt) * prompt
        + Fraction(prices.completion) * completion
        + Fraction(prices.request)
    ) * NANO
    assert 0 <= prices.cost(prompt, completion) - exact < 1


@given(PRICES, COUNTS, COUNTS, COUNTS, COUNTS)
def test_no_request_within_its_bytes_and_tokens_costs_more_than_its_bound(
    prices: Prices, size: int, most: int, tokens: int, answer: int
) -> None:
    used = prices.cost(min(tokens, size + TEMPLATE_TOKENS), min(answer, most))
    assert used <= prices.bound(size, most)


def test_digits_are_taken_as_they_were_written() -> None:
    assert nano(0.1) == nano("0.1") == nano(Decimal("0.1")) == 100_000_000
    assert nano("1e-10") == nano("1e-400000") == 1
    assert ceiling("1e-10") == 0
    assert nano(0) == ceiling(0) == 0
    assert dollars(nano("12.345678901")) == 12.345678901


def test_prices_per_million_are_prices_per_token() -> None:
    prices = Prices.per_million(3, 15, 0.01)
    assert prices == Prices(Decimal("0.000003"), Decimal("0.000015"), Decimal("0.01"))
    assert prices.cost(1000, 100) == 3_000_000 + 1_500_000 + 10_000_000
    assert not prices.free
    assert Prices.per_million(0, 0).free
    assert Prices.per_million(0, 0).bound(10**9, 10**9) == 0
    assert pickle.loads(pickle.dumps(prices)) == prices


@pytest.mark.parametrize(
    "value", ["", "x", "1,5", "NaN", "sNaN", "Infinity", "-0.01", -1, float("nan"), 1e10, "9" * 999]
)
@pytest.mark.parametrize("read", [nano, ceiling])
def test_what_is_no_amount_is_refused_with_a_short_reason(read: object, value: object) -> None:
    with pytest.raises(ValueError, match=r"correct it|plain number") as refused:
        read(value)  # type: ignore[operator]
    assert len(str(refused.value)) < 140


@pytest.mark.parametrize("price", ["-1", "NaN", "Infinity"])
def test_a_price_that_is_none_is_refused(price: str) -> None:
    with pytest.raises(ValueError, match="price per completion is"):
        Prices(Decimal(0), Decimal(price))


def test_tokens_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="completion_tokens is -1, below 0"):
        Prices.per_million(1, 1).cost(0, -1)
