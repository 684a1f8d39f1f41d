"""Money as it is counted inside: integer nano-dollars, and what tokens cost.

Every amount that is charged or set aside is rounded up, every ceiling down, so that rounding can
never overspend. Nothing here knows teachers, requests or what was spent.
"""

from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import Self

NANO = 10**9
"""Nano-dollars of a dollar."""

LARGEST_USD = 10**9
"""More than this is a mistake, and sums of less always fit in 64 bits."""

LARGEST_CHARGE = 10**6 * NANO
"""What one request can be charged at most; a claim above it is counted as this."""

TEMPLATE_TOKENS = 512
"""What a provider's chat template may add to a prompt: role marks, a preamble for tools."""

# So many digits that rounding, where any is needed, stays far below a nano-dollar.
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
        """From dollars per million tokens, and per single request."""
        million = Decimal(10**6)
        prompt, completion = _decimal(prompt_usd), _decimal(completion_usd)
        return cls(
            _UP.divide(prompt, million), _UP.divide(completion, million), _decimal(request_usd)
        )

    @property
    def free(self) -> bool:
        """Whether no request can cost anything."""
        return not (self.prompt or self.completion or self.request)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Nano-dollars of one request with so many tokens, rounded up."""
        for name, tokens in (("prompt", prompt_tokens), ("completion", completion_tokens)):
            if tokens < 0:
                raise ValueError(f"{name}_tokens is {tokens}, below 0: a provider counts from 0")
        prompt = _UP.multiply(self.prompt, Decimal(prompt_tokens))
        completion = _UP.multiply(self.completion, Decimal(completion_tokens))
        usd = _UP.add(_UP.add(prompt, completion), self.request)
        return _nano(usd, _UP)

    def bound(self, prompt_bytes: int, max_tokens: int) -> int:
        """Nano-dollars that one request costs at most, rounded up.

        `prompt_bytes` is the size of the whole request body: no token that it holds is shorter
        than a byte, and JSON is never shorter than the text in it. What the provider's chat
        template adds is allowed for by `TEMPLATE_TOKENS`.
        """
        return self.cost(prompt_bytes + TEMPLATE_TOKENS, max_tokens)


def nano(usd: float | str | Decimal) -> int:
    """Dollars that are charged or set aside, as nano-dollars: rounded up."""
    return _nano(_checked(_decimal(usd), "amount"), _UP)


def ceiling(usd: float | str | Decimal) -> int:
    """Dollars that may be spent at most, as nano-dollars: rounded down."""
    return _nano(_checked(_decimal(usd), "ceiling"), _DOWN)


def dollars(amount: int) -> float:
    """Nano-dollars as dollars, for reports."""
    return amount / NANO


def _nano(usd: Decimal, context: Context) -> int:
    return int(context.multiply(usd, Decimal(NANO)).to_integral_value(context.rounding))


def _decimal(usd: float | str | Decimal) -> Decimal:
    """Exactly the digits that a person or a provider wrote."""
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
