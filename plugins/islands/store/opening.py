"""Object stores: the port, and stores that are opened by their address with the package `obstore`.

    file:///shared/islands   a folder that every island sees
    s3://bucket/islands      AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, as AWS names them
    gs://…, az://…           the same for these clouds

Credentials come from the environment, never from an address.

A store has conditional writes: of several writers of a new key, exactly one succeeds. Listings may
be late; reads of one key may not. `RetryingStore` tries operations again for some seconds, and
counts the traffic.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

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

    def put(self, key: str, data: bytes) -> None:
        """Write an object, or replace it."""

    def get(self, key: str) -> bytes | None:
        """Return an object; None if there is none.

        Raises `CorruptObject` for more than `LARGEST_OBJECT` bytes, of which none is read.
        """

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes; None if there is none."""

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys below a folder, such as "rounds/"; may be late by some writes."""

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""


REQUEST_S = 60.0
"""Seconds after which a request that does not progress has failed."""
PROBE = "probe"


def open_store(uri: str, request_s: float = REQUEST_S) -> ObjectStore:
    """Open a store; raises `StoreUnfit` for a bad address, or a store without conditional writes.

    Writes a small object and removes it, so that a missing bucket or permission is reported here.
    """
    store = _Obstore(_connected(uri, request_s))
    check_conditional_writes(store, uri)
    return store


def check_conditional_writes(store: ObjectStore, uri: str) -> None:
    """Raise `StoreUnfit` unless the second of two conditional writes of one key is refused."""
    key = f"{PROBE}/{secrets.token_hex(8)}"
    try:
        written = store.put_new(key, b"1"), store.put_new(key, b"2")
        store.delete(key)
    except StoreUnavailable as error:
        raise StoreUnfit(
            f"{uri} refused a test object ({error.args[2]}): correct the address, create the "
            "bucket, or set the credentials in the environment"
        ) from error
    if written != (True, False):
        raise StoreUnfit(
            f"{uri} accepted two conditional writes of one key, but exactly one may succeed, or "
            "islands would average different contributions: use a store that honours "
            "If-None-Match, such as S3, or a folder by file://"
        )


def _connected(uri: str, request_s: float) -> Any:
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise StoreUnfit(
            f"{uri} needs the package obstore, which is not installed: pip install "
            "'composer-mesh[islands]'"
        ) from None
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise StoreUnfit(f"{uri} must have an absolute path: write file:///path/of/a/folder")
        return LocalStore(parts.path, mkdir=True)
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {"timeout": timedelta(seconds=request_s), "allow_http": plain}
    retries: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=request_s)}
    try:
        return from_url(uri, client_options=options, retry_config=retries)
    except Exception as error:
        raise StoreUnfit(
            f"{uri} is not an address of an object store ({error}): write file:///folder, "
            "s3://bucket/folder, gs://bucket/folder or az://container/folder"
        ) from error


class _Obstore:
    """The port on one of obstore's stores."""

    def __init__(self, store: Any) -> None:
        import obstore
        from obstore import exceptions

        self._store, self._calls = store, obstore
        self._exists, self._failed = exceptions.AlreadyExistsError, exceptions.BaseError

    @contextmanager
    def _named(
        self, what: str, key: str, expected: type[Exception] = FileNotFoundError
    ) -> Iterator[None]:
        """Turn errors of the store into `StoreUnavailable`, all but an expected one."""
        try:
            yield
        except expected:
            raise
        except (self._failed, OSError) as error:
            raise StoreUnavailable(what, key, _reason(error)) from error

    def put_new(self, key: str, data: bytes) -> bool:
        try:
            with self._named("write", key, self._exists):
                self._calls.put(self._store, key, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._named("write", key, self._exists):
            self._calls.put(self._store, key, data)

    def get(self, key: str) -> bytes | None:
        with suppress(FileNotFoundError), self._named("read", key):
            found = self._calls.get(self._store, key)
            if (size := int(found.meta["size"])) > LARGEST_OBJECT:
                raise CorruptObject(key, f"has {size} bytes, above {LARGEST_OBJECT}: remove it")
            return bytes(found.bytes())
        return None

    def size(self, key: str) -> int | None:
        with suppress(FileNotFoundError), self._named("look at", key):
            return int(self._calls.head(self._store, key)["size"])
        return None

    def keys(self, prefix: str) -> Iterator[str]:
        with suppress(FileNotFoundError), self._named("list", prefix):
            for chunk in self._calls.list(self._store, prefix):
                yield from (str(one["path"]) for one in chunk)

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._named("delete", key):
            self._calls.delete(self._store, key)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes of the objects sent and received, and operations that were tried again."""

    sent: int = 0
    received: int = 0
    retries: int = 0

    def count(self, sent: int, received: int) -> None:
        """Add a transfer."""
        self.sent += sent
        self.received += received


class RetryingStore:
    """Tries each operation again until `patience_s` have passed, then raises its error.

    A conditional write that is tried again may find its own object: False then says only that the
    key exists.
    """

    def __init__(
        self,
        store: ObjectStore,
        patience_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._patience_s, self._sleep = store, patience_s, sleep
        self.traffic = Traffic()

    def put_new(self, key: str, data: bytes) -> bool:
        written = self._insist(lambda: self._store.put_new(key, data))
        self.traffic.sent += len(data)
        return written

    def put(self, key: str, data: bytes) -> None:
        self._insist(lambda: self._store.put(key, data))
        self.traffic.sent += len(data)

    def get(self, key: str) -> bytes | None:
        data = self._insist(lambda: self._store.get(key))
        self.traffic.received += len(data or b"")
        return data

    def size(self, key: str) -> int | None:
        return self._insist(lambda: self._store.size(key))

    def keys(self, prefix: str) -> Iterator[str]:
        yield from self._insist(lambda: list(self._store.keys(prefix)))

    def delete(self, key: str) -> None:
        self._insist(lambda: self._store.delete(key))

    def _insist(self, work: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(self._patience_s),
            sleep=self._sleep,
            before_sleep=lambda _: self._count(),
            reraise=True,
        )
        return retrying(work)

    def _count(self) -> None:
        self.traffic.retries += 1
