"""What a client asks before each request that may cost something, and tells after it."""

from typing import Protocol


class Meter(Protocol):
    """Who is told what each request may cost before it is sent, and did cost when it has ended."""

    async def reserve(self, teacher: str, bound: int | None) -> int:
        """Set nano-dollars aside; raises ProviderBudgetError where the request must not be sent.

        None is a request whose price nobody knows. Returns the reservation's number.
        """

    async def settle(self, reservation: int, charge: int | None) -> int:
        """Replace a reservation by the charge, once; None charges all of it. Returns the charge."""
