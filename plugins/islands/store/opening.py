"""Opens object stores by their address, with the package `obstore`.

    file:///shared/islands   a folder that every island sees
    s3://bucket/islands      AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, as AWS names them
    gs://…, az://…           the same for these clouds

Credentials come from the environment, never from an address.
"""

import os
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from composer_mesh.plugins.islands.store.port import (
    LARGEST_OBJECT,
    CorruptObject,
    ObjectStore,
    StoreUnavailable,
    StoreUnfit,
)

REQUEST_S = 60.0
"""Seconds after which a request that does not progress has failed."""
PROBE = "probe"


def open_store(uri: str, request_s: float = REQUEST_S) -> ObjectStore:
    """Open a store; raises `StoreUnfit` for a bad address, or a store without conditional writes.

    Writes a small object and removes it, so that a missing bucket or permission is told here.
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
            f"{uri} is no address of an object store ({error}): write file:///folder, "
            "s3://bucket/folder, gs://bucket/folder or az://container/folder"
        ) from error


class _Obstore:
    """The port on one of obstore's stores."""

    def __init__(self, store: Any) -> None:
        import obstore
        from obstore import exceptions

        self._store, self._calls = store, obstore
        self._exists, self._failed = exceptions.AlreadyExistsError, exceptions.BaseError

    def put_new(self, key: str, data: bytes) -> bool:
        try:
            self._calls.put(self._store, key, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        except (self._failed, OSError) as error:
            raise StoreUnavailable("write", key, _reason(error)) from error
        return True

    def put(self, key: str, data: bytes) -> None:
        try:
            self._calls.put(self._store, key, data)
        except (self._failed, OSError) as error:
            raise StoreUnavailable("write", key, _reason(error)) from error

    def get(self, key: str) -> bytes | None:
        try:
            found = self._calls.get(self._store, key)
            if (size := int(found.meta["size"])) > LARGEST_OBJECT:
                raise CorruptObject(key, f"has {size} bytes, above {LARGEST_OBJECT}: remove it")
            return bytes(found.bytes())
        except FileNotFoundError:
            return None
        except (self._failed, OSError) as error:
            raise StoreUnavailable("read", key, _reason(error)) from error

    def size(self, key: str) -> int | None:
        try:
            return int(self._calls.head(self._store, key)["size"])
        except FileNotFoundError:
            return None
        except (self._failed, OSError) as error:
            raise StoreUnavailable("look at", key, _reason(error)) from error

    def keys(self, prefix: str) -> Iterator[str]:
        try:
            for chunk in self._calls.list(self._store, prefix):
                yield from (str(one["path"]) for one in chunk)
        except FileNotFoundError:
            return
        except (self._failed, OSError) as error:
            raise StoreUnavailable("list", prefix, _reason(error)) from error

    def delete(self, key: str) -> None:
        try:
            self._calls.delete(self._store, key)
        except FileNotFoundError:
            return
        except (self._failed, OSError) as error:
            raise StoreUnavailable("delete", key, _reason(error)) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
