"""Rules of a hard spending limit: what to reserve for the next request and whether it fits.

The highest possible cost of a request is reserved before it is sent, and replaced by the actual
cost when the request ends. A cost above the reservation counts only as far as the limits have
space, so charges never exceed a limit, however many requests are in flight and whatever providers
state. A teacher that states more than was reserved gets higher bounds from then on. Amounts are
nano-dollars; this module does no storage or I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from composer_mesh.configs.worded import Worded
from composer_mesh.rollouts.money import ceiling, dollars, nano

MILLION = 10**6
LARGEST_RATIO = 10**6
"""Above this ratio of charge to bound, later bounds are raised by amount instead of by ratio."""


class BudgetRefusal(Exception):
    """A request must not be sent because of its actual or possible cost."""


class OverBudget(BudgetRefusal):
    """The next request might exceed a spending limit."""

    def __init__(self, of: str, limit: int, taken: int, amount: int) -> None:
        super().__init__(of, limit, taken, amount)
        self.of, self.limit, self.taken, self.amount = of, limit, taken, amount

    def __str__(self) -> str:
        return (
            f"a request of up to ${dollars(self.amount):.6f} does not fit under the ceiling of "
            f"{self.of}, ${dollars(self.limit):.6f}, of which ${dollars(self.taken):.6f} are "
            "spent or set aside"
        )


class OutOfRequests(Worded, BudgetRefusal):
    """The run has sent its maximum number of requests."""

    message = "all {0} requests of the run are spent"


class UnknownPrice(Worded, BudgetRefusal):
    """The price of a request is unknown, and the budget refuses such requests."""

    message = "nobody says what a request costs, so no ceiling could hold"


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
