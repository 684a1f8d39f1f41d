"""Signatures of files in a run directory: whether this account's own program wrote them.

A run directory may come from anybody, also where its files belong to the viewer, as those of an
unpacked archive do. So a file that decides what is run, or where API keys are sent, is signed with
a key that only this account can read (HMAC-SHA256); the key never leaves its folder. A signature is
about one content under one name in one folder, so that no file counts in a folder to which somebody
has copied it with its signature:

    ~/.local/state/composer-mesh/signing.key      or below $XDG_STATE_HOME
    RUN/.launch.json.signature                    next to the file that it signs

Without its signature a file is data: it may be shown, and nothing is done because of it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from composer_mesh.configs.regular_files import UnusableFile, open_regular, read_regular
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import MIB

KEY_FILE = "signing.key"
KEY_BYTES = 32
LONGEST = 16 * MIB
"""Size in bytes of the largest file that is signed."""
STATE_HOME = "XDG_STATE_HOME"

log = logging.getLogger(__name__)


def sign(path: Path, content: bytes) -> None:
    """Write the signature of a file's new content.

    Where the key cannot be kept the file stays without one, which is logged: then commands treat it
    as a stranger's.
    """
    try:
        with OpenFolder(path.parent) as folder:
            signature = _signature(_key(create=True), path, content)
            folder.write_whole(signature_file(path).name, signature)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        log.warning("%s is not signed, so it counts as a stranger's: %s", path, error)


def is_signed(path: Path, content: bytes) -> bool:
    """Return whether this account's program wrote a file with this content."""
    try:
        found = read_regular(signature_file(path), 2 * hashlib.sha256().digest_size)
        expected = _signature(_key(create=False), path, content)
    except (OSError, RuntimeError):
        return False
    return hmac.compare_digest(found, expected)


def is_own(path: Path) -> bool:
    """Return whether this account's program wrote a file as it is now."""
    try:
        return is_signed(path, read_regular(path, LONGEST))
    except OSError:
        return False


def signature_file(path: Path) -> Path:
    """Return the path of a file's signature."""
    return path.with_name(f".{path.name}.signature")


def key_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the key; raises RuntimeError if there is no home folder."""
    stated = environ.get(STATE_HOME, "")
    home = Path(stated) if stated.startswith("/") else Path.home() / ".local" / "state"
    return home / "composer-mesh"


def _signature(key: bytes, path: Path, content: bytes) -> bytes:
    """Return the signature of a content in its place, wherever links lead to that."""
    message = b"\0".join([os.fsencode(path.name), os.fsencode(path.parent.resolve()), content])
    return hmac.new(key, message, hashlib.sha256).hexdigest().encode()


def _key(create: bool) -> bytes:
    path = key_folder() / KEY_FILE
    if create and not path.exists():
        _make_key(path)
    with open_regular(path, follow=False) as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UnusableFile(None, "others can use it: remove it", str(path))
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise UnusableFile(None, f"it has not {KEY_BYTES} bytes: remove it", str(path))
    return key


def _make_key(path: Path) -> None:
    """Create the key, complete or not at all; one that another process has created stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink(missing_ok=True)
