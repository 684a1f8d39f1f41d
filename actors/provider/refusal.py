"""Converts a provider's error status, body and headers into one typed error.

All inputs are untrusted: texts are truncated and stripped of control characters.
"""

import math
import string
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from composer_mesh.actors.provider.errors import (
    ProviderError,
    ProviderModerationError,
    ProviderPaymentError,
    ProviderServerError,
    error_class,
)

EXCERPT_CHARS = 200
ID_CHARS = 80
LONGEST_DATE = 64
LONGEST_WAIT_S = 366 * 86_400.0
HTTP_DATES = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y")
ID_HEADERS = ("x-request-id", "request-id", "cf-ray")
MODERATION_CODES = {
    "content_filter",
    "content_policy_violation",
    "responsibleaipolicyviolation",
    "moderation_blocked",
}
NO_MONEY_CODES = {"insufficient_quota", "billing_hard_limit_reached"}
"""Error codes sent with 429 and 400 for which retrying does not help."""


def refusal(teacher: str, status: int, error: Any, wait_s: float | None) -> ProviderError:
    """Return the error of a response with this status."""
    return _kind(status, error)(teacher, f"status {status}: {error_text(error)}", wait_s)


def refusal_in_answer(teacher: str, error: Any, wait_s: float | None) -> ProviderError:
    """Return the error of a 200 response with an error: generation failed midway."""
    code = error.get("code") if isinstance(error, dict) else None
    status = int(code) if isinstance(code, int | str) and _is_status(str(code)) else 0
    kind = _kind(status, error) if status >= 400 or _names(error) else ProviderServerError
    shown = "" if code is None else f" {excerpt(str(code))}"
    return kind(teacher, f"status 200 with an error{shown}: {error_text(error)}", wait_s)


def error_text(error: Any) -> str:
    """Return an error's message and moderation reasons, as one line."""
    message = error.get("message") if isinstance(error, dict) else error
    message = "it does not say why" if message in (None, "") else message
    reasons = _metadata(error).get("reasons")
    why = f" ({', '.join(map(str, reasons))})" if isinstance(reasons, list) and reasons else ""
    return excerpt(f"{message}{why}")


def excerpt(text: str, most: int = EXCERPT_CHARS) -> str:
    """Return one line of printable characters, truncated."""
    line = " ".join(text[: 20 * most].split())
    line = "".join(char for char in line if char.isprintable())
    return line if len(line) <= most else f"{line[:most]}…"


def clean_id(value: Any) -> str:
    """Return a provider's id without characters that are invalid in ids."""
    allowed = string.ascii_letters + string.digits + "-_.:/+=@"
    text = value if isinstance(value, str) else ""
    return "".join(char for char in text[: 4 * ID_CHARS] if char in allowed)[:ID_CHARS]


def provider_id(headers: Mapping[str, str], body: Mapping[str, Any] | None, sent: str) -> str:
    """Return the provider's own request id, or ""; an echo of the sent id does not count."""
    told = [headers.get(name) for name in ID_HEADERS]
    told.append(body.get("id") if body is not None else None)
    return next((found for value in told if (found := clean_id(value)) not in ("", sent)), "")


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds of a Retry-After header (number or date); None if invalid."""
    if value is None or len(value) > LONGEST_DATE:
        return None
    try:
        seconds = float(value)
    except ValueError:
        date = _http_date(value)
        if date is None:
            return None
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    return min(max(0.0, seconds), LONGEST_WAIT_S) if math.isfinite(seconds) else None


def _http_date(value: str) -> datetime | None:
    """Parse a date as HTTP writes it (RFC 9110, 5.6.7): always in GMT, never with an offset."""
    for form in HTTP_DATES:
        try:
            return datetime.strptime(value.strip(), form).replace(tzinfo=UTC)
        except ValueError:
            continue
    return None


def _kind(status: int, error: Any) -> type[ProviderError]:
    names = _names(error)
    if status < 500 and (names & MODERATION_CODES or (status == 403 and _flagged(error))):
        return ProviderModerationError
    if names & NO_MONEY_CODES:
        return ProviderPaymentError
    return error_class(status)


def _names(error: Any) -> set[str]:
    """Return the known textual codes of an error, from all places where providers put them."""
    if not isinstance(error, dict):
        return set()
    inner = error.get("innererror")
    places = [error.get("code"), error.get("type"), _metadata(error).get("error_type")]
    places.append(inner.get("code") if isinstance(inner, dict) else None)
    names = {place.lower() for place in places if isinstance(place, str)}
    return names & (MODERATION_CODES | NO_MONEY_CODES)


def _flagged(error: Any) -> bool:
    """Return whether a 403 is OpenRouter's moderation error."""
    return bool({"reasons", "flagged_input"} & _metadata(error).keys())


def _metadata(error: Any) -> Mapping[str, Any]:
    metadata = error.get("metadata") if isinstance(error, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _is_status(code: str) -> bool:
    return len(code) == 3 and code.isascii() and code.isdecimal()
