"""The rules of a hard ceiling: what one more request sets aside, and whether that still fits.

A request's highest possible cost is set aside before it is sent, and its real cost replaces that
when it has ended. So what was charged never passes a ceiling, however many requests are under
way, as long as nobody charges more than the bound. A teacher that does raises its later bounds.
Nothing here stores, waits or sends; amounts are nano-dollars.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from composer_mesh.rollouts.money import ceiling, dollars, nano

MILLION = 10**6
LARGEST_RATIO = 10**6
"""Bounds that were passed by more than this are raised by amount, not by ratio."""


class BudgetRefusal(Exception):
    """A request must not be sent, because of what it costs or may cost."""


class OverBudget(BudgetRefusal):
    """One more request might pass a ceiling."""

    def __init__(self, of: str, limit: int, taken: int, amount: int) -> None:
        super().__init__(of, limit, taken, amount)
        self.of, self.limit, self.taken, self.amount = of, limit, taken, amount

    def __str__(self) -> str:
        return (
            f"a request of up to ${dollars(self.amount):.6f} does not fit under the ceiling of "
            f"{self.of}, ${dollars(self.limit):.6f}, of which ${dollars(self.taken):.6f} are "
            "spent or set aside"
        )


class UnknownPrice(BudgetRefusal):
    """Nobody says what a request costs, and such requests are refused."""

    def __str__(self) -> str:
        return "nobody says what a request costs, so no ceiling could hold"


class SettledTwice(Exception):
    """A reservation was settled before: the second charge is a mistake, and is not counted."""

    def __init__(self, reservation: int) -> None:
        super().__init__(reservation)

    def __str__(self) -> str:
        return f"reservation {self.args[0]} is settled: settle each reservation once"


@dataclass(frozen=True, slots=True)
class Raise:
    """By how much a teacher passed its bounds so far: the most by ratio, and by amount."""

    millionths: int = MILLION
    least: int = 0

    def amount(self, bound: int) -> int:
        """What is set aside for a request with this bound."""
        return max(-(-bound * self.millionths // MILLION), self.least)

    def after(self, bound: int, charge: int) -> "Raise":
        """The same, once a request with this bound was charged this much."""
        if charge <= self.amount(bound):
            return self
        if charge > bound * LARGEST_RATIO:
            return Raise(self.millionths, charge)
        return Raise(-(-charge * MILLION // bound), self.least)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was set aside for one request, under which number."""

    number: int
    amount: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What is charged or set aside under each of the ceilings that one request falls under."""

    run: int
    teacher: int
    day: int


@dataclass(frozen=True)
class BudgetRules:
    """Ceilings in dollars, and what happens where nobody says a price.

    `usd` bounds the run, `per_teacher` some of its teachers, `usd_per_day` all runs of a UTC day
    that share a ledger. A request counts for the day on which it was sent.
    """

    usd: float = 0.0
    per_teacher: Mapping[str, float] = field(default_factory=dict)
    usd_per_day: float | None = None
    unknown_prices: Literal["refuse", "allow"] = "refuse"
    assumed_usd: float = 0.05

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
        """A request's bound, or what is assumed for one that has none; raises UnknownPrice."""
        if bound is not None:
            return bound
        if self.unknown_prices == "refuse":
            raise UnknownPrice
        return nano(self.assumed_usd)

    def check(self, teacher: str, taken: Taken, amount: int) -> None:
        """Raises OverBudget where setting `amount` aside would pass a ceiling.

        What costs nothing always fits, also where an overrun has passed a ceiling.
        """
        ceilings = (
            ("the run", self.of_run, taken.run),
            (f"teacher {teacher!r}", self.of_teachers.get(teacher), taken.teacher),
            ("the day (UTC)", self.of_day, taken.day),
        )
        for of, limit, used in ceilings:
            if amount and limit is not None and used + amount > limit:
                raise OverBudget(of, limit, used, amount)


@dataclass(frozen=True, slots=True)
class Account:
    """Sums over some requests: charged, still set aside, how many, and how many passed a bound."""

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
    """What a ledger holds: one run in all and by teacher, and all its runs by UTC day.

    `abandoned` is the part of the run's `reserved` that no living process will settle: its
    requests may have been charged, so it stays counted.
    """

    run: Account
    teachers: dict[str, Account]
    days: dict[str, Account]
    abandoned: int
