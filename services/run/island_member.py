"""The identity of an island's run directory: what one run merged is never another one's."""

import secrets
from pathlib import Path

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.directory.claim import RunDirectoryError

MEMBER_FILE = ".island"
DIGITS = 16


def with_member(config: Config, root: Path) -> Config:
    """Return an island's config with the identity of its directory, which is made at first.

    A run that is no island is returned unchanged. Raises RunDirectoryError for an unreadable file.
    """
    if not config.islands.on:
        return config
    file = root / MEMBER_FILE
    try:
        member = read_regular(file, 2 * DIGITS).decode("ascii", "replace").strip()
    except FileNotFoundError:
        member = secrets.token_hex(DIGITS // 2)
        write_whole(file, f"{member}\n".encode())
    if len(member) != DIGITS or set(member) - set("0123456789abcdef"):
        raise RunDirectoryError(
            f"{file} holds {member[:40]!r} but must hold {DIGITS} hexadecimal digits: put it back "
            "from a copy, or remove it, and the run goes on from the newest common weights"
        )
    islands = config.islands.model_copy(update={"member": member})
    return config.model_copy(update={"islands": islands})
