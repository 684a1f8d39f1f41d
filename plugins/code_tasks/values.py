"""Values as tagged JSON that keeps value and exact type. Standard library only: boxes run it.

Numbers, texts, booleans and None stand for themselves; everything else is an object with one key,
its type. What is none of the known types cannot be encoded; nothing is ever unpickled.
"""

import math
from collections.abc import Callable
from typing import Any

DEEPEST = 100


def encode(value: Any, depth: int = 0) -> Any:
    """Return JSON for a value; raise TypeError for a type that is not known."""
    if depth > DEEPEST:
        raise TypeError(f"the value is more than {DEEPEST} levels deep")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if kind is bytes or kind is bytearray:
        return {kind.__name__: value.hex()}
    if kind is list or kind is tuple:
        return {kind.__name__: [encode(one, depth + 1) for one in value]}
    if kind is dict:
        items = [[encode(key, depth + 1), encode(one, depth + 1)] for key, one in value.items()]
        return {"dict": items}
    if kind is set or kind is frozenset:
        return {kind.__name__: sorted((encode(one, depth + 1) for one in value), key=repr)}
    raise TypeError(f"a {kind.__name__} cannot be encoded")


def decode(found: Any) -> Any:
    """Return the value of its JSON; raise ValueError for JSON that `encode` does not make."""
    if found is None or isinstance(found, bool | int | float | str):
        return found
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError("tagged JSON is a plain value, or an object with one key")
    ((kind, content),) = found.items()
    return _decoded(str(kind), content)


def _decoded(kind: str, content: Any) -> Any:
    plain: dict[str, Callable[[str], Any]] = {"int": lambda text: int(text, 16), "float": float}
    plain |= {"bytes": bytes.fromhex, "bytearray": bytearray.fromhex}
    several: dict[str, Callable[[Any], Any]] = {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
    }
    if kind in plain and isinstance(content, str):
        return plain[kind](content)
    if kind in several and isinstance(content, list):
        return several[kind](decode(one) for one in content)
    if kind == "dict" and isinstance(content, list):
        return {decode(key): decode(one) for key, one in content}
    if kind == "complex" and isinstance(content, list):
        real, imaginary = map(decode, content)
        return complex(real, imaginary)
    raise ValueError(f"tagged JSON has no type {kind[:40]!r}")
