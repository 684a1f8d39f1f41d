"""Downloads of saved weights: a tar of adapters as peft loads them, or of all weights.

An address is signed for a quarter of an hour, so that tools without the client's key can get it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import secrets
import tarfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from starlette.responses import Response

from composer_mesh.plugins.tinker.server.records import Saved
from composer_mesh.services.web.errors import NOT_FOUND, Refused

VALID_S = 900.0

Files = Callable[[Path], dict[str, bytes]]
"""Returns the files of an archive, by name, from a file with weights."""


class Archives:
    """Signs addresses with a key of this process, and answers them."""

    def __init__(self, folder: Path, files: Files, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._files, self._clock = folder, files, clock
        self._key = secrets.token_bytes(32)

    def url(self, saved: Saved, base_url: str) -> tuple[str, datetime]:
        """Return an address of saved weights, and until when it is valid."""
        expires = self._clock() + VALID_S
        content = json.dumps([saved.file, expires]).encode()
        signed = base64.urlsafe_b64encode(self._sign(content) + content).decode()
        return f"{base_url}api/v1/archives/{signed}", datetime.fromtimestamp(expires, UTC)

    async def response(self, signed: str) -> Response:
        """Return the archive of a signed address; raises `Refused`."""
        file = self._opened(signed)
        content = await asyncio.to_thread(self._archive, self._folder / file)
        headers = {"content-disposition": 'attachment; filename="checkpoint.tar"'}
        return Response(content, media_type="application/x-tar", headers=headers)

    def _opened(self, signed: str) -> str:
        gone = Refused(NOT_FOUND, "this address is not valid, or no longer: ask for another one")
        try:
            content = base64.urlsafe_b64decode(signed.encode())
        except ValueError:
            raise gone from None
        signature, rest = content[:32], content[32:]
        if not hmac.compare_digest(signature, self._sign(rest)):
            raise gone
        file, expires = json.loads(rest)
        if expires < self._clock():
            raise gone
        return str(file)

    def _sign(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)

    def _archive(self, path: Path) -> bytes:
        try:
            files = self._files(path)
        except (OSError, ValueError):
            raise Refused(NOT_FOUND, "these weights are gone: save them again") from None
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return whole.getvalue()
