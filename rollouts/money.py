"""Prices and amounts in integer nano-dollars.

Charges and reservations are rounded up and limits are rounded down, so that rounding never
overspends.
"""

from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import Self

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
        for field in fields(self):
            _checked(getattr(self, field.name), f"price per {field.name}")

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
