"""Parses a provider's response into an answer or a typed error, with its charge.

The bytes are untrusted: every field is checked before use.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import (
    ProviderError,
    ProviderMalformed,
    ProviderModerationError,
    ProviderServerError,
)
from composer_mesh.actors.provider.json_body import json_object
from composer_mesh.actors.provider.keys import Secret
from composer_mesh.actors.provider.money import highest_prices, token_counts, told_charge
from composer_mesh.actors.provider.refusal import (
    EXCERPT_CHARS,
    excerpt,
    provider_id,
    refusal,
    refusal_in_answer,
    retry_after_s,
)
from composer_mesh.rollouts.pairs import TeacherAnswer
from composer_mesh.rollouts.tool_calls import (
    CLOSE,
    OPEN,
    Unreadable,
    assistant_message,
    call_text,
    json_at,
)

MODEL_CHARS = 120
LONGEST_ACTION = 2**20
"""Characters of an answer's text or call."""
OTHER_ERRORS = ("detail", "message")
"""Keys under which servers other than OpenAI's put error messages."""


@dataclass(frozen=True, slots=True)
class Reply:
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


def read_reply(teacher: TeacherEndpoint, reply: Reply | NoResponse, call_id: str) -> Reading:
    """Return the teacher's action in a response, or the error, with the cost."""
    if isinstance(reply, NoResponse):
        return Reading(reply.error, None if reply.sent else 0)
    body = reply.body()
    charge = told_charge(body, highest_prices(teacher))
    if charge is None and 300 <= reply.status < 500 and reply.status != 408:
        charge = 0  # refused before anything was generated
    try:
        completion = read_completion(teacher.name, reply, body)
        return Reading(_answer(teacher.name, reply, completion, call_id), charge)
    except ProviderError as error:
        found = provider_id(reply.headers, body, reply.request_id)
        named = f"{error.text} (request {found})" if found else error.text
        return Reading(type(error)(teacher.name, named, error.retry_after_s), charge)


def read_completion(teacher: str, reply: Reply, body: dict[str, Any] | None) -> dict[str, Any]:
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


def _answer(teacher: str, reply: Reply, completion: dict[str, Any], call_id: str) -> TeacherAnswer:
    """Return the action in a completion; raises a ProviderError if there is none.

    A call whose arguments are not a JSON object is still an answer: malformed, counted as
    abstention.
    """
    choice = _first_choice(completion)
    message = choice.get("message")
    if choice.get("finish_reason") == "content_filter":
        raise ProviderModerationError(teacher, "a content filter ended its answer")
    if choice.get("finish_reason") == "error":
        raise ProviderServerError(teacher, "generation ended with an error that it did not tell")
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
