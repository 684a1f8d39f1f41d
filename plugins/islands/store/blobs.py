"""Large objects with checksums, and registers that are decided once.

A blob is parts, which a resumed upload need not send again, and then a head:

    KEY.parts/00000-DIGEST ...   parts of the payload, named by their content
    KEY.0                        the head: sizes, checksums and a table about it; written once

A blob is visible when its head is, and then all of its parts are.

A register gives the same intact value to whoever reads it, however often:

    KEY.0   torn by a failed write        each attempt is a key of its own, written conditionally;
    KEY.1   intact: the value             the first intact one is the value, for all and for good

A value has a checksum, so that a torn one is not taken for the value. It is passed over only after
several equal reads, because a read may be torn as well. What a stranger has put there is passed
over in the same way: `is_value` says what a register may hold, and is the same for all readers.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.plugins.islands.store.opening import CorruptObject, ObjectStore, StoreUnavailable

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
        raise CorruptObject(key, "is not a table")
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


PART_BYTES = 32 << 20
Sleep = Callable[[float], None]


@dataclass(frozen=True)
class BlobHead:
    """A blob's head: the table about it, and name, bytes and SHA-256 of each part."""

    about: dict[str, Any]
    parts: tuple[tuple[str, int, str], ...]

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(size for _, size, _ in self.parts)


def put_blob(
    store: ObjectStore,
    key: str,
    payload: bytes,
    about: dict[str, Any],
    *,
    part_bytes: int = PART_BYTES,
    sleep: Sleep = time.sleep,
) -> BlobHead:
    """Write a blob unless there is one; return the head of the one that is there.

    Parts that an interrupted call has written are not sent again.
    """
    if (head := head_of(store, key, sleep)) is not None:
        return head
    parts = list(_parts(key, payload, part_bytes))
    for name, chunk, _ in parts:
        _put_part(store, name, chunk)
    listed = [[name, len(chunk), digest] for name, chunk, digest in parts]
    return _head(decide(store, key, {"about": about, "parts": listed}, sleep, _is_head))


def head_of(store: ObjectStore, key: str, sleep: Sleep = time.sleep) -> BlobHead | None:
    """Return a blob's head; None if there is none."""
    found = decided(store, key, sleep, _is_head)
    return None if found is None else _head(found)


def payload_of(store: ObjectStore, head: BlobHead, size: int) -> bytes:
    """Return a blob's payload of `size` bytes.

    Raises `CorruptObject` for another size, of which nothing is read, and for parts that are
    missing or changed.
    """
    if head.size != size:
        raise CorruptObject(head.parts[0][0], f"is of {head.size} bytes but {size} are its values")
    return b"".join(_checked(store, *part) for part in head.parts)


def is_payload(head: BlobHead, payload: bytes) -> bool:
    """Whether a blob has this payload, by its checksums."""
    place = 0
    for _, size, digest in head.parts:
        if hashlib.sha256(payload[place : place + size]).hexdigest() != digest:
            return False
        place += size
    return place == len(payload)


def delete_folder(store: ObjectStore, folder: str) -> None:
    """Remove the blobs of a folder such as "states/7/", heads first: none may lack its parts."""
    for key in sorted(store.keys(folder), key=lambda one: ".parts/" in one):
        store.delete(key)


def _put_part(store: ObjectStore, name: str, chunk: bytes) -> None:
    """Write a part unless it is there; once more where only some of it was stored."""
    for _ in range(ATTEMPTS):
        if store.size(name) == len(chunk):
            return
        store.put(name, chunk)
    if store.size(name) != len(chunk):
        raise StoreUnavailable("write", name, f"{ATTEMPTS} writes of it were torn")


def _parts(key: str, payload: bytes, part_bytes: int) -> Iterator[tuple[str, bytes, str]]:
    for place, start in enumerate(range(0, max(1, len(payload)), part_bytes)):
        chunk = payload[start : start + part_bytes]
        digest = hashlib.sha256(chunk).hexdigest()
        yield f"{key}.parts/{place:05d}-{digest[:16]}", chunk, digest


def _checked(store: ObjectStore, name: str, size: int, digest: str) -> bytes:
    data = store.get(name)
    if data is None:
        raise CorruptObject(name, "is gone")
    if len(data) != size:
        raise CorruptObject(name, f"has {len(data)} bytes of {size}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptObject(name, f"has a wrong checksum over its {size} bytes")
    return data


def _is_head(found: dict[str, Any]) -> bool:
    parts = found.get("parts")
    if not isinstance(found.get("about"), dict) or not isinstance(parts, list) or not parts:
        return False
    return all(isinstance(one, list) and [*map(type, one)] == [str, int, str] for one in parts)


def _head(found: dict[str, Any]) -> BlobHead:
    parts = tuple((name, size, digest) for name, size, digest in found["parts"])
    return BlobHead(found["about"], parts)
