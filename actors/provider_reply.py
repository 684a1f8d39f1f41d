"""Reading what a provider sent: a chat completion becomes an answer or a typed error.

The bytes are untrusted: every field is checked before it is used. Nothing here sends, waits or
reads a key.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from composer_mesh.actors.provider_errors import (
    ProviderError,
    ProviderMalformed,
    ProviderServerError,
    error_class,
)
from composer_mesh.rollouts.pairs import TeacherAnswer
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN, assistant_message, call_text

EXCERPT_CHARS = 200


def read_completion(
    teacher: str, status: int, headers: Mapping[str, str], raw: bytes
) -> dict[str, Any]:
    """The completion in a response; raises the ProviderError that the response stands for.

    A 200 that holds an error is an error: providers send one when generation fails half-way.
    """
    wait = retry_after_s(headers.get("retry-after"))
    body = _json_object(raw)
    error = _error_in(body)
    if status != 200:
        text = _message_of(error) if error is not None else _excerpt(raw)
        raise error_class(status)(teacher, f"status {status}: {text}", wait)
    if error is not None:
        raise _error_of(teacher, error, wait)
    if body is None:
        raise ProviderMalformed(teacher, f"status 200, but not a JSON object: {_excerpt(raw)}")
    return body


def read_answer(
    teacher: str, completion: dict[str, Any], call_id: str, latency_s: float
) -> TeacherAnswer:
    """The action in a completion; raises ProviderMalformed where there is none.

    A call whose arguments are no JSON object stays an answer: a malformed one, which abstains.
    """
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise ProviderMalformed(teacher, "the completion holds no choices[0].message")
    text = action_text(teacher, message)
    usd = _cost(completion.get("usage"))
    try:
        text.encode()
        spoken = assistant_message(text, call_id)
    except ValueError:
        raise ProviderMalformed(teacher, "the message holds what JSON cannot: not text") from None
    return TeacherAnswer(teacher, text, spoken, usd or 0.0, usd is not None, latency_s)


def action_text(teacher: str, message: dict[str, Any]) -> str:
    """A provider's assistant message in the student's own words.

    The student makes one call per turn, so of several only the first counts, and talk beside a
    call is left out: it is not what teachers agree on.
    """
    calls = message.get("tool_calls")
    if not calls:
        return _content_text(teacher, message.get("content"))
    call = calls[0] if isinstance(calls, list) else None
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ProviderMalformed(teacher, "tool_calls[0] holds no function with a name")
    arguments = function.get("arguments")
    parsed = _json_object(arguments.encode()) if isinstance(arguments, str) else arguments
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


def _cost(usage: Any) -> float | None:
    cost = usage.get("cost") if isinstance(usage, dict) else None
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        return None
    return float(cost) if math.isfinite(cost) and cost >= 0 else None


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None where it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _error_in(body: dict[str, Any] | None) -> Any:
    """The error of a body: its own, or that of its first choice."""
    if body is None:
        return None
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return body.get("error") or (first.get("error") if isinstance(first, dict) else None)


def _error_of(teacher: str, error: Any, wait: float | None) -> ProviderError:
    code = error.get("code") if isinstance(error, dict) else None
    status = int(code) if isinstance(code, int | str) and str(code).isdecimal() else 0
    kind = error_class(status) if status >= 400 else ProviderServerError
    return kind(teacher, f"status 200 with an error {code}: {_message_of(error)}", wait)


def _message_of(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return _excerpt(str(message).encode(errors="replace"))


def _excerpt(raw: bytes) -> str:
    line = " ".join(raw.decode(errors="replace").split())
    line = "".join(char for char in line if char.isprintable())
    return line if len(line) <= EXCERPT_CHARS else f"{line[:EXCERPT_CHARS]}…"
