"""The port to an object store, and what can go wrong with one.

A store has conditional writes: of several writers of a new key, exactly one succeeds. Listings may
be late; reads of one key may not.
"""

from collections.abc import Iterator
from typing import Protocol

from composer_mesh.configs.plugins import PluginFailed
from composer_mesh.configs.worded import Worded

LARGEST_OBJECT = 1 << 28
"""Bytes of the largest object that is read: registers and parts of blobs have far fewer."""


class StoreUnavailable(Worded, PluginFailed):
    """The store did not carry out an operation now: it may do so later."""

    message = "the object store did not {0} {1}: {2}"


class StoreUnfit(PluginFailed):
    """The store or its address cannot be used: what was found, the bound and the repair."""


class CorruptObject(Worded, Exception):
    """An object is not what was written: its key, and what is wrong with it."""

    message = "{0} {1}"


class ObjectStore(Protocol):
    """Objects by key; every method raises `StoreUnavailable`."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists; return whether this call has written it."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, or replace it."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return an object; None if there is none.

        Raises `CorruptObject` for more than `LARGEST_OBJECT` bytes, of which none is read.
        """
        ...

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes; None if there is none."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys below a folder, such as "rounds/"; may be late by some writes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        ...
