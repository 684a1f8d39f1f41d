"""Budget of a hint writer: requests and dollars of one run.

Dollars are reserved before a request is sent and settled when its price is known. Concurrent
requests can therefore overspend by at most the excess of their prices over the reserved amounts.
"""

from dataclasses import dataclass, field


@dataclass
class HintBudget:
    """Reserves `assumed_usd` for each request, or the highest price seen if that is more.

    `assumed_usd` is also charged for requests without a known price; `spent_usd` never falls.
    """

    requests: int
    usd: float
    assumed_usd: float
    sent: int = 0
    spent_usd: float = 0.0
    _highest: float = field(default=0.0, init=False)
    _aside: float = field(default=0.0, init=False)

    def reserve(self) -> float | None:
        """Reserve one request; return the dollars to pass to `settle`, or None if over budget."""
        wanted = max(self.assumed_usd, self._highest)
        if self.sent >= self.requests or self.spent_usd + self._aside + wanted > self.usd:
            return None
        self.sent += 1
        self._aside += wanted
        return wanted

    def settle(self, reserved: float, usd: float | None) -> float:
        """Charge a finished request and return the charge; `usd` is None for an unknown price."""
        self._aside = max(0.0, self._aside - reserved)
        charged = self.assumed_usd if usd is None else usd
        self._highest = max(self._highest, charged)
        self.spent_usd += charged
        return charged

    @property
    def refusal(self) -> str:
        """Why `reserve` returned None, with the repair."""
        if self.sent >= self.requests:
            return (
                f"all {self.requests} requests of the run are spent: raise "
                "sdpo.hints.llm.budget_requests"
            )
        return (
            f"${self.spent_usd:.4f} of ${self.usd:.4f} are spent and the next request may not "
            "fit: raise sdpo.hints.llm.budget_usd"
        )
