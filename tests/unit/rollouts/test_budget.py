"""The rules of the ceiling, without a ledger: what fits, what is refused, what overruns raise.

Amounts are whole nano-dollars, and rounding never favours the spender.
"""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.budget import (
    LARGEST_RATIO,
    NANO,
    TEMPLATE_TOKENS,
    Account,
    BudgetRules,
    LargestExcess,
    OutOfRequests,
    OverBudget,
    Prices,
    SettledTwice,
    TakenAmounts,
    UnknownPrice,
    ceiling,
    dollars,
    nano,
)

AMOUNTS = st.integers(0, 10**12)


@given(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS)
def test_an_amount_fits_exactly_when_no_ceiling_is_passed(
    run: int, teacher: int, day: int, amount: int
) -> None:
    rules = BudgetRules(usd=500, per_teacher={"a": 300}, usd_per_day=400)
    taken = TakenAmounts(run, teacher, day)
    free = min(nano(500) - run, nano(300) - teacher, nano(400) - day)
    if amount == 0 or amount <= free:
        rules.check("a", taken, amount)
    else:
        with pytest.raises(OverBudget):
            rules.check("a", taken, amount)


@pytest.mark.parametrize(
    ("taken", "of"),
    [
        (TakenAmounts(10**9, 0, 0), "the run"),
        (TakenAmounts(0, 10**9, 0), "teacher 'a'"),
        (TakenAmounts(0, 0, 10**9), "the day"),
    ],
)
def test_a_refusal_names_its_ceiling_and_the_amounts(taken: TakenAmounts, of: str) -> None:
    rules = BudgetRules(usd=1, per_teacher={"a": 1}, usd_per_day=1)
    with pytest.raises(OverBudget) as refused:
        rules.check("a", taken, nano(0.25))
    text = str(refused.value)
    assert f"the ceiling of {of}" in text
    assert "$0.250000 does not fit" in text
    assert "$1.000000, of which $1.000000 are spent or set aside" in text


def test_a_teacher_without_a_ceiling_of_its_own_has_that_of_the_run() -> None:
    rules = BudgetRules(usd=2, per_teacher={"a": 1})
    rules.check("b", TakenAmounts(run=0, teacher=nano(1), day=0), nano(1))
    with pytest.raises(OverBudget, match="the run"):
        rules.check("b", TakenAmounts(run=nano(1.5), teacher=0, day=0), nano(1))


def test_nothing_may_be_spent_by_default_and_what_is_free_always_fits() -> None:
    with pytest.raises(OverBudget):
        BudgetRules().check("a", TakenAmounts(0, 0, 0), 1)
    BudgetRules().check("a", TakenAmounts(5, 5, 5), 0)


def test_unknown_prices_are_refused_unless_an_amount_is_assumed() -> None:
    with pytest.raises(UnknownPrice, match="the cost of a request is unknown"):
        BudgetRules(usd=1).bound(None)
    assert BudgetRules(unknown_prices="allow", assumed_usd=0.02).bound(None) == nano(0.02)
    assert BudgetRules().bound(7) == 7


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**15)), max_size=20))
def test_what_was_once_charged_for_a_bound_is_set_aside_for_it_from_then_on(
    requests: list[tuple[int, int]],
) -> None:
    raised = LargestExcess()
    for bound, charge in requests:
        before = raised.amount(bound)
        raised = raised.after(bound, charge)
        assert raised.amount(bound) >= max(before, charge)
    for bound, charge in requests:
        assert raised.amount(bound) >= charge
    assert raised.millionths <= LARGEST_RATIO * 10**6


def test_an_overrun_raises_later_bounds_by_its_ratio() -> None:
    raised = LargestExcess().after(bound=100, charge=150)
    assert (raised.amount(100), raised.amount(1000), raised.amount(1)) == (150, 1500, 2)
    assert raised.after(bound=100, charge=150) is raised
    assert LargestExcess().after(bound=0, charge=7).amount(0) == 7


def test_accounts_add_up() -> None:
    total = sum([Account(1, 2, 3, 4), Account(10, 20, 30, 40)], Account())
    assert total == Account(11, 22, 33, 44)


@pytest.mark.parametrize(
    "error", [OverBudget("the run", 1, 2, 3), OutOfRequests(2), UnknownPrice(), SettledTwice(4)]
)
def test_refusals_travel_between_processes(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


DOLLARS = st.decimals(0, 10**6, allow_nan=False, allow_infinity=False)
PRICES = st.builds(Prices, st.decimals(0, 1), st.decimals(0, 1), st.decimals(0, 1))
COUNTS = st.integers(0, 10**7)


@given(DOLLARS)
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
