"""Parses the JSON of a provider within limits, so that whoever walks it cannot be made to fail.

Deep nesting exhausts the stack of every recursive reader, and millions of tiny values stop the
event loop for seconds; neither is in any answer of a provider.
"""

import json
from typing import Any

DEEPEST = 64
"""Levels of lists and objects."""
MOST_VALUES = 250_000
"""Estimated by the commas and opening brackets, so commas inside texts count as well."""


def json_object(raw: bytes) -> dict[str, Any] | None:
    """Return the object that the bytes are; None if they are none within the limits."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        return None
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_too_deep(value) else None


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    """Return the lists and objects directly inside a value."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return []
    return [inner for inner in value if isinstance(inner, list | dict)]
