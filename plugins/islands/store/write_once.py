"""Registers that are decided once: whoever asks, and however often, gets the same intact value.

    KEY.0   torn by a failed write        each attempt is a key of its own, written conditionally;
    KEY.1   intact: the value             the first intact one is the value, for all and for good

A value has a checksum, so that a torn one is not taken for the value. It is passed over only after
several equal reads, because a read may be torn as well. What a stranger has put there is passed
over in the same way: `is_value` says what a register may hold, and is the same for all readers.
"""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, Literal

from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.plugins.islands.store.port import CorruptObject, ObjectStore, StoreUnavailable

Missing = Literal["absent", "torn"]
IsValue = Callable[[dict[str, Any]], bool]
ABSENT: Missing = "absent"
TORN: Missing = "torn"
ATTEMPTS = 8
READS = 3
"""Number of equal reads after which an object counts as torn."""
BETWEEN_READS_S = 0.2


def seal(about: dict[str, Any]) -> bytes:
    """Return a table as JSON with its checksum."""
    body = json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unseal(key: str, data: bytes) -> dict[str, Any]:
    """Return the table; raises `CorruptObject` where it is not what was sealed."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptObject(key, f"has a wrong checksum over its {len(body)} bytes")
    about = parsed_json(body)
    if not isinstance(about, dict):
        raise CorruptObject(key, "is no table")
    return about


def decide(
    store: ObjectStore,
    key: str,
    about: dict[str, Any],
    sleep: Callable[[float], None] = time.sleep,
    is_value: IsValue = bool,
) -> dict[str, Any]:
    """Write a value unless one is decided; return the decided one, of whoever it is.

    Raises `StoreUnavailable`; a later call then finds what this one may have written.
    """
    data = seal(about)
    for attempt in range(ATTEMPTS):
        name = f"{key}.{attempt}"
        store.put_new(name, data)
        found = _read(store, name, sleep, is_value)
        if found is ABSENT:
            raise StoreUnavailable("read", name, "it was written but cannot be read yet")
        if isinstance(found, dict):
            return found
    raise StoreUnavailable("decide", key, f"{ATTEMPTS} writes of it were torn")


def decided(
    store: ObjectStore,
    key: str,
    sleep: Callable[[float], None] = time.sleep,
    is_value: IsValue = bool,
) -> dict[str, Any] | None:
    """Return the decided value; None as long as there is none."""
    for attempt in range(ATTEMPTS):
        found = _read(store, f"{key}.{attempt}", sleep, is_value)
        if found is ABSENT:
            return None
        if isinstance(found, dict):
            return found
    raise StoreUnavailable("read", key, f"{ATTEMPTS} writes of it were torn")


def _read(
    store: ObjectStore, name: str, sleep: Callable[[float], None], is_value: IsValue
) -> dict[str, Any] | Missing:
    """Return an attempt's value, or that it is absent or torn; raises where its reads differ."""
    first: bytes | None = None
    for read in range(READS):
        try:
            data = store.get(name)
        except CorruptObject:
            return TORN
        if data is None:
            return ABSENT
        try:
            about = unseal(name, data)
            return about if is_value(about) else TORN
        except (CorruptObject, ValueError):
            if first is not None and data != first:
                raise StoreUnavailable("read", name, "two reads of it differ") from None
            first = data
        if read + 1 < READS:
            sleep(BETWEEN_READS_S)
    return TORN
