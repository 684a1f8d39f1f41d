"""Config keys under a former name, which is read with a warning for one minor release.

docs/python.md has the rule.
"""

import warnings
from collections.abc import Sequence
from typing import Any

KEYS: dict[str, str] = {}
"""Former key to key, with dots, as in `--set`."""


def with_present_keys(table: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Move values of former keys in the table to the present ones; return overrides likewise."""
    for former, key in KEYS.items():
        *above, name = former.split(".")
        holder = _table(table, above)
        *path, last = key.split(".")
        if name not in holder or last in _table(table, path):
            continue  # a table with both is refused: the former is no key
        _warn(former, key)
        value, target = holder.pop(name), table
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
    return [_present(text) for text in overrides]


def _table(table: Any, path: Sequence[str]) -> dict[str, Any]:
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _present(override: str) -> str:
    given, equals, value = override.partition("=")
    key = KEYS.get(given.strip())
    if key is None:
        return override
    _warn(given.strip(), key)
    return f"{key}{equals}{value}"


def _warn(former: str, key: str) -> None:
    text = f"the config key {former} is now {key}: rename it, the next minor release refuses it"
    warnings.warn(text, FutureWarning, stacklevel=2)
