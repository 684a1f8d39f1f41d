"""Flattens nested tables to keys with dots, to compare configs and to show them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables as text, by keys with dots: `trainer.lr`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
