"""Bounds on the cost of a request, and the costs that providers report.

A provider's numbers are untrusted: an invalid amount counts as not reported. Amounts are
nano-dollars.

The cost of one query: each attempt is reserved before it is sent and settled afterwards. A query
may be cancelled at any time, also while it reserves or settles: none of its reservations stays
open, and none is settled twice.

Port of the provider client to a budget.
"""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.rollouts.budget import LARGEST_CHARGE, LARGEST_USD, Prices, dollars, nano


class Meter(Protocol):
    """Reserves the maximum cost of each request before it is sent, and settles its actual cost.

    A cancelled `reserve` leaves nothing reserved, and a cancelled `settle` is completed.
    """

    async def reserve(self, teacher: str, bound: int | None) -> int:
        """Reserve nano-dollars; raises ProviderBudgetError if the request must not be sent.

        The bound None stands for an unknown price. Returns the reservation's number.
        """

    async def settle(self, reservation: int, charge: int | None) -> int:
        """Settle a reservation once; None charges all of it.

        Returns what counts: a charge above the reservation only as far as the ceilings allow.
        """


class Bill:
    """The attempts of one query: `charged` nano-dollars so far, `known` if every cost is known.

    `bound` is the most that one attempt can cost at the teacher's prices, None if those are
    unknown. A response that states more is charged the bound, and the highest such claim is
    `overcharge`. Without a meter it only sums the costs that responses report.
    """

    def __init__(self, meter: Meter | None, teacher: str, bound: int | None) -> None:
        self._meter, self._teacher = meter, teacher
        self.charged, self.known = 0, True
        self.bound, self.overcharge = bound, 0

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator["Attempt"]:
        """Context manager of one request, which sets its charge; by default the full reservation.

        Raises ProviderBudgetError, and does not run the block, if nothing may be reserved.
        """
        reservation = None
        if self._meter is not None:
            reservation = await self._meter.reserve(self._teacher, self.bound)
        attempt = Attempt()
        try:
            yield attempt
        finally:
            await self._settle(reservation, attempt.charge)

    async def _settle(self, reservation: int | None, charge: int | None) -> None:
        believed = self._believed(charge)
        settled = believed or 0
        if self._meter is not None and reservation is not None:
            settled = await self._meter.settle(reservation, believed)
        self.charged += settled
        self.known &= self.bound == 0 or settled == charge

    def _believed(self, charge: int | None) -> int | None:
        """Return a stated charge up to the bound: more is not what the request can cost."""
        if charge is None or self.bound is None or charge <= self.bound:
            return charge
        self.overcharge = max(self.overcharge, charge)
        return self.bound


class Attempt:
    """One request; `charge` is None while its cost is unknown."""

    charge: int | None = None


MILLION = 10**6
MOST_TOKENS = 10**9
"""Higher token counts are invalid."""


def highest_prices(teacher: TeacherEndpoint) -> Prices | None:
    """Return the maximum prices of the teacher's provider; None if they are unknown.

    A `max_price` of its routing replaces the listed price: providers behind one model differ, and a
    more expensive one may answer within it.
    """
    if teacher.prices is None:
        return None
    most = (teacher.routing or {}).get("max_price") or {}
    given = {key: _price(most.get(key)) for key in ("prompt", "completion", "request")}
    prompt, completion, request = given["prompt"], given["completion"], given["request"]
    return Prices(
        teacher.prices.prompt if prompt is None else prompt / MILLION,
        teacher.prices.completion if completion is None else completion / MILLION,
        teacher.prices.request if request is None else request,
    )


def routing_of(teacher: TeacherEndpoint) -> dict[str, Any]:
    """Return OpenRouter's `provider` object, which excludes providers above the known prices."""
    routing = dict(teacher.routing or {})
    if (prices := highest_prices(teacher)) is None:
        return routing
    most = {
        "prompt": float(prices.prompt * MILLION),
        "completion": float(prices.completion * MILLION),
    }
    if prices.request:
        most["request"] = float(prices.request)
    return {**routing, "max_price": {**most, **(routing.get("max_price") or {})}}


def bound(teacher: TeacherEndpoint, body_bytes: int) -> int | None:
    """Return the maximum cost of a request with this body size; None if unknown."""
    prices = highest_prices(teacher)
    return None if prices is None else prices.bound(body_bytes, teacher.max_tokens)


def reported_charge(body: Mapping[str, Any] | None, prices: Prices | None) -> int | None:
    """Return a response's reported cost: in dollars, or in tokens with known prices; else None."""
    usage = body.get("usage") if body is not None else None
    if not isinstance(usage, dict):
        return None
    cost = _reported_cost(usage)
    if cost is not None:
        return cost
    prompt, completion = token_counts(usage)
    if prices is None or prompt is None or completion is None:
        return None
    return min(LARGEST_CHARGE, prices.cost(prompt, completion))


def token_counts(usage: Any) -> tuple[int | None, int | None]:
    """Return prompt and completion tokens of a `usage` object, each None if invalid."""
    reported = usage if isinstance(usage, dict) else {}
    return _count(reported.get("prompt_tokens")), _count(reported.get("completion_tokens"))


def listed_prices(listing: Mapping[str, Any] | None, model: str) -> Prices | None:
    """Return a model's prices in OpenRouter's model list; None if absent or variable.

    Reasoning tokens are billed as completion tokens or at their own price: the higher one counts.
    """
    entries = listing.get("data") if listing is not None else None
    for entry in entries if isinstance(entries, list) else []:
        pricing = entry.get("pricing") if isinstance(entry, dict) else None
        if isinstance(pricing, dict) and entry.get("id") == model:
            return _prices(pricing)
    return None


def _prices(pricing: Mapping[str, Any]) -> Prices | None:
    prompt, completion = _price(pricing.get("prompt")), _price(pricing.get("completion"))
    request, thought = _price(pricing.get("request", 0)), _price(pricing.get("internal_reasoning"))
    if prompt is None or completion is None or request is None:
        return None
    return Prices(prompt, max(completion, thought or Decimal(0)), request)


def _reported_cost(usage: Mapping[str, Any]) -> int | None:
    """Return OpenRouter's `usage.cost`, plus the upstream provider's bill for a BYOK key."""
    cost = _amount(usage.get("cost"))
    if cost is None or usage.get("is_byok") is not True:
        return cost
    details = usage.get("cost_details")
    upstream = _amount(details.get("upstream_inference_cost") if isinstance(details, dict) else 0)
    return None if upstream is None else min(LARGEST_CHARGE, cost + upstream)


def _amount(usd: Any) -> int | None:
    """Parse dollars from a JSON number, capped at the largest charge."""
    if isinstance(usd, bool) or not isinstance(usd, int | float):
        return None
    if isinstance(usd, float) and not math.isfinite(usd):
        return None
    if usd < 0:
        return None
    return LARGEST_CHARGE if usd >= dollars(LARGEST_CHARGE) else nano(usd)


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MOST_TOKENS else None


def _price(value: Any) -> Decimal | None:
    """Parse dollars from a JSON number or text; OpenRouter lists variable prices as -1."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        price = Decimal(value if isinstance(value, str) else repr(value))
    except (InvalidOperation, ValueError):
        return None
    return price if price.is_finite() and 0 <= price <= LARGEST_USD else None
