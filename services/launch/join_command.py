"""`composer-mesh join`: a host that takes part in a run from now on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from composer_mesh.mesh.hosts.address import BadAddress, split
from composer_mesh.services.directory.control import ControlRefused, ask


def join_command(run: Path, address: str) -> int:
    """Ask the controller of a live run to take a worker. Waits until it is attached."""
    try:
        split(address)
    except BadAddress as bad:
        raise ControlRefused(str(bad)) from bad
    answer = asyncio.run(ask(run, "join", address=address))
    sys.stdout.write(f"{answer}\n")
    return 0
