"""Cost limits of teachers in dollars, and the policy for unknown prices."""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import Dollars, DollarsAboveZero, FilePath, Section


class BudgetConfig(Section):
    """A hard spending limit: each request's highest possible cost is reserved before it is sent."""

    usd: Dollars = 0.0
    """Maximum total cost of all teachers in the run; 0 allows free teachers only."""

    usd_per_day: Dollars | None = None
    """Maximum cost per day (UTC) of all runs that share `ledger`."""

    unknown_prices: Literal["refuse", "allow"] = "refuse"
    """Whether to query teachers with unknown prices."""

    assumed_usd: DollarsAboveZero = 0.05
    """Dollars charged for a request of unknown price, if those are allowed."""

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
