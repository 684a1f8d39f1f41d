"""What a hint writer may still spend: requests and dollars of one run.

Dollars are set aside before a request is sent and settled when its price is known, so requests
that are under way together cannot overspend by more than their prices exceed what was set aside.
Nothing here sends or waits.
"""

from dataclasses import dataclass, field


@dataclass
class HintBudget:
    """`assumed_usd` is set aside for each request, or the highest price seen where that is more.

    It is also charged for requests without a known price; `spent_usd` never falls.
    """

    requests: int
    usd: float
    assumed_usd: float
    sent: int = 0
    spent_usd: float = 0.0
    _highest: float = field(default=0.0, init=False)
    _aside: float = field(default=0.0, init=False)

    def reserve(self) -> float | None:
        """The dollars set aside for one more request, which `settle` must be told; None for no."""
        wanted = max(self.assumed_usd, self._highest)
        if self.sent >= self.requests or self.spent_usd + self._aside + wanted > self.usd:
            return None
        self.sent += 1
        self._aside += wanted
        return wanted

    def settle(self, reserved: float, usd: float | None) -> float:
        """Charge a request that has ended; None where nobody told its price. Returns the charge."""
        self._aside = max(0.0, self._aside - reserved)
        charged = self.assumed_usd if usd is None else usd
        self._highest = max(self._highest, charged)
        self.spent_usd += charged
        return charged

    @property
    def refusal(self) -> str:
        """Why `reserve` says no, with the repair."""
        if self.sent >= self.requests:
            return (
                f"all {self.requests} requests of the run are spent: raise "
                "sdpo.hints.llm.budget_requests"
            )
        return (
            f"${self.spent_usd:.4f} of ${self.usd:.4f} are spent and the next request may not "
            "fit: raise sdpo.hints.llm.budget_usd"
        )
