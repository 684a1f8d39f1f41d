"""Reads frames of clients: JSON, bounded, with errors by code.

`SessionRequestRefused` is why a request was not served, as its error frame says it.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from composer_mesh.configs.validation import errors_of, place_and_text, validated
from composer_mesh.mesh.untrusted_json import LONGEST_REASON, parsed_json
from composer_mesh.plugins.openenv.client.wire import CLIENT_FRAME, ClientFrame, ErrorCode


class SessionRequestRefused(Exception):
    """A request that is not served; with `ends` its session is over."""

    def __init__(self, code: ErrorCode, text: str, ends: bool = False, **more: Any) -> None:
        super().__init__(code, text, ends, more)
        self.code, self.text, self.ends, self.more = code, text, ends, more

    @property
    def data(self) -> dict[str, Any]:
        """The error as the data of an error frame."""
        return {"message": self.text, "code": self.code.value, **self.more}


def invalid(text: str) -> SessionRequestRefused:
    """Return the error for a request that its sender has to change."""
    return SessionRequestRefused(ErrorCode.VALIDATION_ERROR, text)


Model = TypeVar("Model", bound=BaseModel)

MOST_REQUEST_BYTES = 2**20
"""Bytes of a client's longest frame or body."""
MOST_ERRORS = 5
FRAME_TYPES = frozenset({"reset", "step", "state", "close", "mcp"})


def client_frame(text: str) -> ClientFrame:
    """Return a client's frame; raise Refused with the code that fits."""
    value = json_object(text)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in FRAME_TYPES:
        known = ", ".join(sorted(FRAME_TYPES))
        raise SessionRequestRefused(
            ErrorCode.UNKNOWN_TYPE, f"the type is {str(kind)[:40]!r}: send one of {known}"
        )
    try:
        return CLIENT_FRAME.validate_python(value)
    except ValidationError as error:
        raise _refusal(error) from None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; raise Refused for any other text."""
    try:
        value = parsed_json(text)
    except ValueError as error:
        raise SessionRequestRefused(ErrorCode.INVALID_JSON, f"this is not JSON: {error}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise SessionRequestRefused(ErrorCode.INVALID_JSON, f"this is a {kind}: send a JSON object")
    return value


def checked(kind: type[Model], value: Any) -> Model:
    """Return a value as a model; raise Refused with its first errors, without what was sent."""
    try:
        return validated(kind, value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> SessionRequestRefused:
    """Return a validation error with its first places."""
    places = [
        {"type": one["type"], "loc": [str(part)[:40] for part in one["loc"]], "msg": one["msg"]}
        for one in errors_of(error)[:MOST_ERRORS]
    ]
    text = f"invalid message: {place_and_text(error)[:LONGEST_REASON]}"
    return SessionRequestRefused(ErrorCode.VALIDATION_ERROR, text, errors=places)
