"""Prices, and rules of a hard spending limit: what to reserve for a request, whether it fits.

Amounts are integer nano-dollars. Charges and reservations are rounded up and limits are rounded
down, so that rounding never overspends.

The highest possible cost of a request is reserved before it is sent, and replaced by the actual
cost when the request ends. A cost above the reservation counts only as far as the limits have
space, so charges never exceed a limit, however many requests are in flight and whatever providers
state. A teacher that states more than was reserved gets higher bounds from then on. This module
does no storage or I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from functools import cached_property
from typing import Literal, Self

from composer_mesh.configs.worded import Worded

NANO = 10**9
"""Nano-dollars per dollar."""

LARGEST_USD = 10**9
"""Larger amounts are mistakes; sums of smaller ones always fit into 64 bits."""

LARGEST_CHARGE = 10**6 * NANO
"""Largest charge of one request; a higher claim is counted as this."""

TEMPLATE_TOKENS = 512
"""Most tokens that a provider's chat template adds to a prompt: role markers, a tool preamble."""

# Enough digits that rounding, if needed at all, stays far below a nano-dollar.
_UP = Context(prec=60, rounding=ROUND_CEILING)
_DOWN = Context(prec=60, rounding=ROUND_FLOOR)


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per prompt token, per completion token and per request."""

    prompt: Decimal
    completion: Decimal
    request: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        for price in fields(self):
            _checked(getattr(self, price.name), f"price per {price.name}")

    @classmethod
    def per_million(
        cls, prompt_usd: float, completion_usd: float, request_usd: float = 0.0
    ) -> Self:
        """Build prices from dollars per million tokens and per request."""
        million = Decimal(10**6)
        prompt, completion = _decimal(prompt_usd), _decimal(completion_usd)
        return cls(
            _UP.divide(prompt, million), _UP.divide(completion, million), _decimal(request_usd)
        )

    @property
    def free(self) -> bool:
        """Whether every request costs nothing."""
        return not (self.prompt or self.completion or self.request)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the cost of one request in nano-dollars, rounded up."""
        for name, tokens in (("prompt", prompt_tokens), ("completion", completion_tokens)):
            if tokens < 0:
                raise ValueError(f"{name}_tokens is {tokens}, below 0: a provider counts from 0")
        prompt = _UP.multiply(self.prompt, Decimal(prompt_tokens))
        completion = _UP.multiply(self.completion, Decimal(completion_tokens))
        usd = _UP.add(_UP.add(prompt, completion), self.request)
        return _nano(usd, _UP)

    def bound(self, prompt_bytes: int, max_tokens: int) -> int:
        """Return the highest possible cost of one request in nano-dollars, rounded up.

        `prompt_bytes` is the size of the complete request body: a token has at least one byte, and
        JSON is never shorter than the text in it. `TEMPLATE_TOKENS` covers what the provider's chat
        template adds.
        """
        return self.cost(prompt_bytes + TEMPLATE_TOKENS, max_tokens)


def nano(usd: float | str | Decimal) -> int:
    """Convert dollars to charge or reserve into nano-dollars, rounded up."""
    return _nano(_checked(_decimal(usd), "amount"), _UP)


def ceiling(usd: float | str | Decimal) -> int:
    """Convert a spending limit in dollars into nano-dollars, rounded down."""
    return _nano(_checked(_decimal(usd), "ceiling"), _DOWN)


def dollars(amount: int) -> float:
    """Convert nano-dollars to dollars, for reports."""
    return amount / NANO


def _nano(usd: Decimal, context: Context) -> int:
    return int(context.multiply(usd, Decimal(NANO)).to_integral_value(context.rounding))


def _decimal(usd: float | str | Decimal) -> Decimal:
    """Return exactly the decimal digits that were given."""
    if isinstance(usd, Decimal):
        return usd
    try:
        return Decimal(usd if isinstance(usd, str) else repr(usd))
    except InvalidOperation:
        raise ValueError(f"amount is {str(usd)[:40]!r}: write dollars as a plain number") from None


def _checked(usd: Decimal, name: str) -> Decimal:
    if not usd.is_finite() or not 0 <= usd <= LARGEST_USD:
        raise ValueError(
            f"{name} is {str(usd)[:40]}, not within 0 and {LARGEST_USD} dollars: correct it"
        )
    return usd


MILLION = 10**6
LARGEST_RATIO = 10**6
"""Above this ratio of charge to bound, later bounds are raised by amount instead of by ratio."""


class BudgetRefusal(Exception):
    """A request must not be sent because of its actual or possible cost."""


class OverBudget(BudgetRefusal):
    """The next request might exceed a spending limit."""

    def __init__(self, of: str, limit: int, taken: int, amount: int) -> None:
        super().__init__(of, limit, taken, amount)

    def __str__(self) -> str:
        of, limit, taken, amount = self.args
        return (
            f"a request of up to ${dollars(amount):.6f} does not fit under the ceiling of {of}, "
            f"${dollars(limit):.6f}, of which ${dollars(taken):.6f} are spent or set aside"
        )


class OutOfRequests(Worded, BudgetRefusal):
    """The run has sent its maximum number of requests."""

    message = "all {0} requests of the run are spent"


class UnknownPrice(Worded, BudgetRefusal):
    """The price of a request is unknown, and the budget refuses such requests."""

    message = "the cost of a request is unknown, so no ceiling could hold"


class SettledTwice(Worded, Exception):
    """A reservation was settled twice; the second charge is not counted."""

    message = "reservation {0} is settled: settle each reservation once"


@dataclass(frozen=True, slots=True)
class LargestExcess:
    """Largest excess of what a teacher stated over its bounds so far, by ratio and by amount."""

    millionths: int = MILLION
    least: int = 0

    def amount(self, bound: int) -> int:
        """Return the amount to reserve for a request with this bound."""
        return max(-(-bound * self.millionths // MILLION), self.least)

    def after(self, bound: int, charge: int) -> "LargestExcess":
        """Return the raise after a request with this bound was stated to cost `charge`."""
        if charge <= self.amount(bound):
            return self
        if charge > bound * LARGEST_RATIO:
            return LargestExcess(self.millionths, charge)
        return LargestExcess(-(-charge * MILLION // bound), self.least)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The amount reserved for one request, and the reservation's number."""

    number: int
    amount: int


@dataclass(frozen=True, slots=True)
class TakenAmounts:
    """Amounts charged or reserved under each limit of a request; `requests` sent by the run."""

    run: int
    teacher: int
    day: int
    requests: int = 0


@dataclass(frozen=True)
class BudgetRules:
    """Spending limits in dollars, and the policy for requests with unknown prices.

    `usd` limits the run, `per_teacher` individual teachers, `usd_per_day` all runs of a UTC day
    that share a ledger. A request counts towards the day on which it was sent.
    `requests` limits how many requests the run sends.
    """

    usd: float = 0.0
    per_teacher: Mapping[str, float] = field(default_factory=dict)
    usd_per_day: float | None = None
    unknown_prices: Literal["refuse", "allow"] = "refuse"
    assumed_usd: float = 0.05
    requests: int | None = None

    @cached_property
    def of_run(self) -> int:
        return ceiling(self.usd)

    @cached_property
    def of_teachers(self) -> dict[str, int]:
        return {teacher: ceiling(usd) for teacher, usd in self.per_teacher.items()}

    @cached_property
    def of_day(self) -> int | None:
        return None if self.usd_per_day is None else ceiling(self.usd_per_day)

    def bound(self, bound: int | None) -> int:
        """Return a request's bound, or the assumed cost if it is None; may raise UnknownPrice."""
        if bound is not None:
            return bound
        if self.unknown_prices == "refuse":
            raise UnknownPrice
        return nano(self.assumed_usd)

    def check(self, teacher: str, taken: TakenAmounts, amount: int) -> None:
        """Raise OverBudget if `amount` would exceed a limit, OutOfRequests if none is left.

        A zero amount always fits, even if an overrun has already exceeded a limit.
        """
        if self.requests is not None and taken.requests >= self.requests:
            raise OutOfRequests(self.requests)
        for of, limit, used in self._ceilings(teacher, taken):
            if amount and used + amount > limit:
                raise OverBudget(of, limit, used, amount)

    def free(self, teacher: str, taken: TakenAmounts) -> int:
        """Return the amount that all limits still have space for; 0 if one has none."""
        return max(0, min(limit - used for _, limit, used in self._ceilings(teacher, taken)))

    def _ceilings(self, teacher: str, taken: TakenAmounts) -> list[tuple[str, int, int]]:
        """Return name, limit and used amount of each ceiling that there is."""
        ceilings = (
            ("the run", self.of_run, taken.run),
            (f"teacher {teacher!r}", self.of_teachers.get(teacher), taken.teacher),
            ("the day (UTC)", self.of_day, taken.day),
        )
        return [(of, limit, used) for of, limit, used in ceilings if limit is not None]


@dataclass(frozen=True, slots=True)
class Account:
    """Sums over some requests: charged, still reserved, their number, number of exceeded bounds."""

    spent: int = 0
    reserved: int = 0
    requests: int = 0
    overruns: int = 0

    def __add__(self, other: "Account") -> "Account":
        return Account(
            self.spent + other.spent,
            self.reserved + other.reserved,
            self.requests + other.requests,
            self.overruns + other.overruns,
        )


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What a ledger says about one run, in total and by teacher."""

    run: Account
    teachers: dict[str, Account]
