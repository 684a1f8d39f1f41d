"""The warmed interpreters of a test session, from which actors and commands are forked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command_server import COMMANDS
from commands import SERVERS

from composer_mesh.mesh import programs
from composer_mesh.mesh.fork_server import owner
from composer_mesh.mesh.fork_server.protocol import FOLDER, import_signature
from composer_mesh.mesh.processes import kill
from composer_mesh.services.run.preload import PRELOAD


@contextmanager
def warm_servers() -> Iterator[None]:
    """Two servers, found by this process and those it starts through its environment."""
    name = f"{import_signature(os.environ)}.sock"
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        actors, commands = (Path(folder) / kind for kind in ("actors", "commands"))
        for one in (actors, commands):
            one.mkdir()
        started = [
            owner.start(actors / name, PRELOAD, {}),
            owner.start(commands / name, (*PRELOAD, *COMMANDS), {}, program="command_server"),
        ]
        try:
            for _, said in started:
                owner.wait_until_ready(said)
            os.environ |= {FOLDER: str(actors), SERVERS: str(commands)}
            yield
        finally:
            for variable in (FOLDER, SERVERS):
                os.environ.pop(variable, None)
            for pid, _ in started:
                kill(pid)
                programs.reap(pid)
