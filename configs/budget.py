"""What teachers may cost: ceilings in dollars, and what happens where nobody says a price."""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import FilePath, NotNegative, Positive, Section


class BudgetConfig(Section):
    """A hard ceiling: each request's highest possible cost is set aside before it is sent."""

    usd: NotNegative = 0.0
    """Most that all teachers together may cost in the run; 0 allows free teachers only."""

    usd_per_day: NotNegative | None = None
    """Most that all runs that share `ledger` may cost in one day (UTC)."""

    unknown_prices: Literal["refuse", "allow"] = "refuse"
    """What to do with a teacher whose prices nobody knows."""

    assumed_usd: Positive = 0.05
    """Charged for a request of unknown price, where those are allowed."""

    ledger: FilePath | None = None
    """SQLite file of all reservations and charges; in the run directory when not set."""

    @model_validator(mode="after")
    def _a_day_is_seen_by_all_runs(self) -> Self:
        if self.usd_per_day is not None and self.ledger is None:
            raise ValueError(
                f"usd_per_day is {self.usd_per_day} but ledger is not set, so other runs of the "
                "day would not be seen: name one file that all of them share"
            )
        return self
