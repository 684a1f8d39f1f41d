"""API keys of providers: reading them, and redacting them from stored data.

A key is read from its source for each request: a file, the environment of a process that sends
requests itself, or the `Keys` that a run sends to its actors. `Secret` holds it for one request.
"""

import base64
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderAuthError
from composer_mesh.configs.regular_files import read_regular

HIDDEN = "[key]"
SHORTEST_SECRET = 8
"""Shorter keys are not secret, and redacting them would corrupt ordinary text."""
LONGEST_KEY = 16_384

log = logging.getLogger(__name__)


class Keys(dict[str, str]):
    """API keys by the names of their variables, as sent to an actor that uses them.

    They are an argument of its `load`, over the run's own connections: environments and commands of
    processes are logged, inherited and listed. The text of this mapping shows no key.
    """

    def __repr__(self) -> str:
        return f"Keys({', '.join(self)})"


class Secret:
    """The API key of one request, or none; exposed only as a header.

    Texts are searched for the key by letters and digits alone: whatever stands between them, in
    either case, as it is, percent-encoded, in hexadecimal digits, or within base64. A part of the
    key, or another cipher, is not found.
    """

    __slots__ = ("_forms", "_key")

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._forms = () if key is None or len(key) < SHORTEST_SECRET else tuple(_forms(key))

    def __repr__(self) -> str:
        return "Secret()"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def hide(self, text: str) -> str:
        """Return the text with the key redacted."""
        raw = text.encode("utf-8", "surrogatepass")
        hidden = self.hide_bytes(raw)
        return text if hidden is raw else hidden.decode("utf-8", "surrogatepass")

    def hide_bytes(self, raw: bytes) -> bytes:
        found = raw.translate(None, _BETWEEN).lower() if self._forms else b""
        for form in self._forms:
            if form in found:
                signs = (re.escape(bytes([sign])) for sign in form)
                pattern = rb"[^A-Za-z0-9]*+".join(signs)
                raw = re.sub(pattern, HIDDEN.encode(), raw, flags=re.IGNORECASE)
        return raw

    def hide_all(self, value: Any) -> Any:
        """Redact the key in all texts of a parsed JSON value, however they were escaped."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list):
            return [self.hide_all(inner) for inner in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide_all(inner) for key, inner in value.items()}
        return value


_BETWEEN = bytes(one for one in range(256) if not (one < 128 and chr(one).isalnum()))
"""All bytes that are no ASCII letters and digits."""


def _forms(key: str) -> Iterator[bytes]:
    """Yield the forms of a key, in small letters and digits alone; too short ones are left out."""
    raw = key.encode()
    percent = "".join(one if one.isalnum() else f"%{ord(one):02x}" for one in key)
    forms = [raw, percent.encode(), raw.hex().encode()]
    for before in range(3):  # bytes of a group of three that stand before the key
        whole = base64.b64encode(b"\0" * before + raw)
        forms.append(whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6])
    for form in dict.fromkeys(one.translate(None, _BETWEEN).lower() for one in forms):
        if len(form) >= SHORTEST_SECRET:
            yield form


def read_key(teacher: TeacherEndpoint, environ: Mapping[str, str]) -> Secret:
    """Read the teacher's current key; raises ProviderAuthError if it cannot be sent."""
    if teacher.api_key_file is not None:
        source, key = str(teacher.api_key_file), _from_file(teacher.name, teacher.api_key_file)
    elif teacher.api_key_env is not None:
        source, key = teacher.api_key_env, environ.get(teacher.api_key_env, "")
    else:
        return Secret(None)
    key = key.strip()
    if not key:
        raise ProviderAuthError(teacher.name, f"{source} is not set or empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ProviderAuthError(teacher.name, f"{source} holds characters that no HTTP header may")
    return Secret(key)


def warn_if_others_can_read(path: Path) -> None:
    """Log a warning for a key file that other users of the machine can read."""
    if os.name == "posix" and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users can read the key file %s: chmod 600 it", path)


def _from_file(teacher: str, path: Path) -> str:
    try:
        return read_regular(path, LONGEST_KEY).decode("ascii", errors="replace")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ProviderAuthError(teacher, f"the key file {path} cannot be read ({reason})") from None
