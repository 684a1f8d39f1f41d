"""Port of the provider client to a budget."""

from typing import Protocol


class Meter(Protocol):
    """Reserves the maximum cost of each request before it is sent, and settles its actual cost."""

    async def reserve(self, teacher: str, bound: int | None) -> int:
        """Reserve nano-dollars; raises ProviderBudgetError if the request must not be sent.

        The bound None stands for an unknown price. Returns the reservation's number.
        """

    async def settle(self, reservation: int, charge: int | None) -> int:
        """Settle a reservation once; None charges all of it.

        Returns what counts: a charge above the reservation only as far as the ceilings allow.
        """
