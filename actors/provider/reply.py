"""Parses a provider's response into an answer or a typed error, with its charge.

The bytes are untrusted: they are read within limits, and every field is checked before use. An
encoded body is refused, because it can turn kilobytes into gigabytes.

Converts a provider's error status, body and headers into one typed error.

All inputs are untrusted: texts are truncated and stripped of control characters.

Parses the JSON of a provider within limits, so that whoever walks it cannot be made to fail.

Deep nesting, which the parser refuses, exhausts the stack of every recursive reader, and millions
of tiny values stop the event loop for seconds; neither is in any answer of a provider.
"""

import json
import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from composer_mesh.actors.provider.endpoint import Secret, TeacherEndpoint
from composer_mesh.actors.provider.errors import (
    ProviderError,
    ProviderMalformed,
    ProviderModerationError,
    ProviderPaymentError,
    ProviderServerError,
    error_class,
)
from composer_mesh.actors.provider.money import highest_prices, reported_charge, token_counts
from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.rollouts.pairs import TeacherAnswer
from composer_mesh.rollouts.tool_calls import (
    CLOSE,
    OPEN,
    Unreadable,
    assistant_message,
    call_text,
    json_at,
)

EXCERPT_CHARS = 200
ID_CHARS = 80
LONGEST_DATE = 64
LONGEST_WAIT_S = 366 * 86_400.0
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
    return _kind(status, error)(teacher, f"status {status}: {error_text(error)}", wait_s, status)


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
    candidates = [headers.get(name) for name in ID_HEADERS]
    candidates.append(body.get("id") if body is not None else None)
    return next((found for value in candidates if (found := clean_id(value)) not in ("", sent)), "")


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds of a Retry-After header (number or date); None if invalid."""
    if value is None or len(value) > LONGEST_DATE:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    return min(max(0.0, seconds), LONGEST_WAIT_S) if math.isfinite(seconds) else None


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


MOST_VALUES = 250_000
"""Estimated by the commas and opening brackets, so commas inside texts count as well."""


def json_object(raw: bytes) -> dict[str, Any] | None:
    """Return the object that the bytes are; None if they are none within the limits."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        return None
    try:
        value = parsed_json(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


MODEL_CHARS = 120
LONGEST_ACTION = 2**20
"""Characters of an answer's text or call."""
OTHER_ERRORS = ("detail", "message")
"""Keys under which servers other than OpenAI's put error messages."""


@dataclass(frozen=True, slots=True)
class ProviderReply:
    """A complete response; `request_id` is the id sent with its request."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    request_id: str
    secret: Secret

    def body(self) -> dict[str, Any] | None:
        """Return the body's JSON object with the key redacted; None if there is none."""
        body: dict[str, Any] | None = self.secret.hide_all(json_object(self.raw))
        return body

    def words(self) -> str:
        """Return the start of a body that is not a JSON object."""
        return excerpt(self.raw[: 20 * EXCERPT_CHARS].decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class NoResponse:
    """No complete response; `sent` unless the provider certainly never saw the request."""

    error: ProviderError
    sent: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one request; `charge` in nano-dollars, None if unknown."""

    outcome: TeacherAnswer | ProviderError
    charge: int | None

    def answer(self) -> TeacherAnswer:
        """Return the answer; raises the error if there is none."""
        if isinstance(self.outcome, ProviderError):
            raise self.outcome
        return self.outcome


def read_reply(
    teacher: TeacherEndpoint, reply: ProviderReply | NoResponse, call_id: str
) -> Reading:
    """Return the teacher's action in a response, or the error, with the cost."""
    if isinstance(reply, NoResponse):
        return Reading(reply.error, None if reply.sent else 0)
    body = reply.body()
    charge = reported_charge(body, highest_prices(teacher))
    if charge is None and 300 <= reply.status < 500 and reply.status != 408:
        charge = 0  # refused before anything was generated
    try:
        completion = read_completion(teacher.name, reply, body)
        return Reading(_answer(teacher.name, reply, completion, call_id), charge)
    except ProviderError as error:
        found = provider_id(reply.headers, body, reply.request_id)
        named = f"{error.text} (request {found})" if found else error.text
        return Reading(type(error)(teacher.name, named, error.retry_after_s, error.status), charge)


def read_completion(
    teacher: str, reply: ProviderReply, body: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the completion in a response; raises the response's ProviderError.

    A 200 that contains an error is an error: providers send one when generation fails midway.
    """
    wait_s = retry_after_s(reply.headers.get("retry-after"))
    if reply.status != 200:
        error = reply.words() if body is None else _error_in(body, *OTHER_ERRORS)
        raise refusal(teacher, reply.status, error, wait_s)
    if body is None:
        raise ProviderMalformed(teacher, f"status 200, but not a JSON object: {reply.words()}")
    if (error := _error_in(body)) is not None:
        raise refusal_in_answer(teacher, error, wait_s)
    return body


def _answer(
    teacher: str, reply: ProviderReply, completion: dict[str, Any], call_id: str
) -> TeacherAnswer:
    """Return the action in a completion; raises a ProviderError if there is none.

    A call whose arguments are not a JSON object is still an answer: malformed, counted as
    abstention.
    """
    choice = _first_choice(completion)
    message = choice.get("message")
    if choice.get("finish_reason") == "content_filter":
        raise ProviderModerationError(teacher, "a content filter ended its answer")
    if choice.get("finish_reason") == "error":
        raise ProviderServerError(
            teacher, "generation ended with an error that it did not describe"
        )
    if not isinstance(message, dict):
        raise ProviderMalformed(teacher, "the completion holds no choices[0].message")
    try:
        text = reply.secret.hide(action_text(teacher, message))
        text.encode()
        if len(text) > LONGEST_ACTION:
            raise ProviderMalformed(teacher, f"its action has more than {LONGEST_ACTION} signs")
        spoken = assistant_message(text, call_id)
    except (ValueError, RecursionError):
        raise ProviderMalformed(teacher, "the message holds what JSON cannot: not text") from None
    prompt, written = token_counts(completion.get("usage"))
    model = completion.get("model")
    return TeacherAnswer(
        teacher,
        text,
        spoken,
        usd=0.0,
        usd_known=False,
        latency_s=0.0,
        model=excerpt(model, MODEL_CHARS) if isinstance(model, str) else "",
        request_id=provider_id(reply.headers, completion, reply.request_id),
        prompt_tokens=prompt,
        completion_tokens=written,
        cut=choice.get("finish_reason") == "length",
    )


def action_text(teacher: str, message: dict[str, Any]) -> str:
    """Convert a provider's assistant message to the student's action format.

    The student makes one call per turn, so only the first of several calls counts, and text next to
    a call is dropped: teachers are not compared on it.
    """
    calls = message.get("tool_calls")
    if not calls:
        return _content_text(teacher, message.get("content"))
    call = calls[0] if isinstance(calls, list) else None
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ProviderMalformed(teacher, "tool_calls[0] holds no function with a name")
    arguments = function.get("arguments")
    parsed = _arguments(arguments) if isinstance(arguments, str) else arguments
    if isinstance(parsed, dict):
        return call_text(function["name"], parsed)
    raw = json.dumps({"name": function["name"], "arguments": arguments})
    return f"{OPEN}\n{raw}\n{CLOSE}"


def _content_text(teacher: str, content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise ProviderMalformed(teacher, f"content is a {type(content).__name__}, not text")
    return content or ""


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, as strictly as a student's are read; "" stands for none."""
    if not text.strip():
        return {}
    found = json_object(text.encode(errors="surrogatepass"))
    try:
        return found and json_at(text.strip())[0]
    except Unreadable:
        return None


def _first_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _error_in(body: dict[str, Any], *others: str) -> Any:
    """Return a body's error: its own, its first choice's, or the one under other keys."""
    found = [body.get("error"), _first_choice(body).get("error"), *map(body.get, others)]
    return next(filter(None, found), None)


LARGEST_BODY = 8 * 2**20
"""In bytes."""
LARGEST_HEADERS = 64 * 2**10
PLAIN = ("", "identity")
"""Content encodings that are read."""
SHOWN_CHARS = 40


class RefusedReply(Exception):
    """A response breaks a limit and is not read to its end; its text says which one."""


async def bounded_body(response: httpx.Response) -> bytes:
    """Return the body; raises RefusedReply as soon as a limit is passed."""
    _check_headers(response.headers)
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN:
        shown = "".join(filter(str.isprintable, encoding[:SHOWN_CHARS]))
        raise RefusedReply(f"its answer is encoded as {shown!r}, and no encoding was requested")
    stream, body = response.stream, bytearray()
    assert isinstance(stream, httpx.AsyncByteStream), "an async client gave a sync stream"
    async for chunk in stream:
        body += chunk
        if len(body) > LARGEST_BODY:
            raise _too_long()
    return bytes(body)


def _check_headers(headers: httpx.Headers) -> None:
    if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEADERS:
        raise RefusedReply(f"its headers are longer than {LARGEST_HEADERS} bytes")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > LARGEST_BODY:
        raise _too_long()


def _too_long() -> RefusedReply:
    return RefusedReply(f"its answer is longer than {LARGEST_BODY} bytes")
