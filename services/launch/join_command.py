"""`composer-mesh join`: adds a host to a running run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from composer_mesh.mesh.hosts.address import BadAddress, split
from composer_mesh.services.directory.control import ControlRefused, ask


def join_command(run: Path, address: str) -> int:
    """Request that a live run attaches a worker. Waits until it is attached."""
    try:
        split(address)
    except BadAddress as bad:
        raise ControlRefused(str(bad)) from bad
    answer = asyncio.run(ask(run, "join", address=address))
    sys.stdout.write(f"{answer}\n")
    return 0
