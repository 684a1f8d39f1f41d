"""Validation of values that somebody else wrote, at a cost that the first error bounds.

By default pydantic looks for every error, and `ValidationError.errors()` describes all of them with
their inputs: a megabyte of `-1,` has 333,000. `fail_fast` ends a list or mapping at its first
invalid entry; `first_error` describes one error. Nothing else calls `errors()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, SchemaValidator

T = TypeVar("T")

MOST_ERRORS = 10_000
"""Errors that are described at most; a value with more is refused with their number."""
MANY_ERRORS = "many_errors"
COLLECTIONS = frozenset({"list", "tuple", "set", "frozenset", "dict"})
VALUES = frozenset({"config", "default", "expected", "members", "metadata", "serialization"})
"""Keys of a core schema that hold no schema of what is validated."""


def fail_fast(kind: Any) -> TypeAdapter[Any]:
    """Return an adapter whose collections, at any depth, end at their first invalid entry."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = _failing_fast(dict(adapter.core_schema))  # that of a deferred model is made by reading
    # Without this option a model inside is checked by its own validator, which finds all errors.
    adapter.validator = SchemaValidator(schema, _use_prebuilt=False)
    return adapter


def validated(kind: type[T], value: Any) -> T:
    """Return a value as a model; raise ValidationError."""
    return _adapter(kind).validate_python(value)


def validated_json(kind: type[T], text: str | bytes) -> T:
    """Return a JSON text as a model; raise ValidationError."""
    return _adapter(kind).validate_json(text)


def first_error(error: ValidationError, *, with_input: bool = False) -> ErrorDetails:
    """Return the first error: its `type`, `loc` and `msg`; `input` only `with_input`."""
    return errors_of(error, with_input=with_input)[0]


def errors_of(error: ValidationError, *, with_input: bool = False) -> list[ErrorDetails]:
    """Return all errors; of more than `MOST_ERRORS`, one that states their number."""
    if (count := error.error_count()) > MOST_ERRORS:
        number = PydanticCustomError(MANY_ERRORS, "{count} values are invalid", {"count": count})
        stated = InitErrorDetails(type=number, loc=(), input=None)
        error = ValidationError.from_exception_data(error.title, [stated])
    return error.errors(include_url=False, include_input=with_input)


def place_and_text(error: ValidationError) -> str:
    """Return the first error as `place: message`, without the input."""
    first = first_error(error)
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(fail_fast)


def _failing_fast(schema: Any) -> Any:
    """Return a copy of a core schema, or of schemas by name, whose collections fail fast."""
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(one) for one in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    values = VALUES if isinstance(kind, str) else frozenset[str]()  # else a field's name is "type"
    parts = {key: one if key in values else _failing_fast(one) for key, one in schema.items()}
    return parts | {"fail_fast": True} if isinstance(kind, str) and kind in COLLECTIONS else parts
