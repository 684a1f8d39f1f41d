"""The command: offers a task to others until Ctrl-C."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from composer_mesh.configs.load import load_config, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import add_import_paths
from composer_mesh.mesh.private_folder import own_private_folder
from composer_mesh.plugins.openenv.server.options import NEEDED, ServeOptions, WorkerStart
from composer_mesh.plugins.openenv.server.processes import ServerProcesses, start_program
from composer_mesh.services.checks.keys import held_keys
from composer_mesh.services.web.http_server import listening_socket
from composer_mesh.services.web.options import ServeRefused, check_installed, checked_token

POLL_S = 0.5


def serve_env(
    target: str,
    overrides: Sequence[str],
    options: ServeOptions,
    token_env: str | None,
    say: Callable[[str], None],
) -> int:
    """Serve a task, or a config's task, until a signal ends it; return the exit status.

    Raises ServeRefused before anything starts.
    """
    check_installed(NEEDED, "serve-env")
    token = checked_token(options, token_env)
    config = config_of(target, overrides)
    add_import_paths(config.run.import_paths)
    ended = _ended_by_signals()
    with (
        held_keys(config),  # an environment server asks no model API
        TemporaryDirectory(dir=own_private_folder()) as folder,
        listening_socket(options.host, options.port) as listener,  # which the processes inherit
    ):
        served = options.model_copy(update={"port": listener.getsockname()[1]})
        starts = [
            WorkerStart(options=served, config=config, folder=folder, number=number, token=token)
            for number in range(options.processes)
        ]
        make = functools.partial(start_program, listener.fileno())
        return _serve(ServerProcesses(starts, say, make), served, say, ended)


def config_of(target: str, overrides: Sequence[str]) -> Config:
    """Return the config at a path that ends in .toml, or one for a task alone."""
    if target.endswith(".toml"):
        return load_config(Path(target), overrides, model_later=True)
    table = {"run": {"name": "serve-env", "steps": 1}, "data": {"task": target}}
    return resolve_config(table, overrides, target)


def _serve(
    processes: ServerProcesses, options: ServeOptions, say: Callable[[str], None], ended: Event
) -> int:
    try:
        processes.start()
        name = f"[{options.host}]" if ":" in options.host else options.host
        say(f"serving http://{name}:{options.port} with {options.processes} processes")
        while not ended.wait(POLL_S):
            if processes.gave_up.is_set():
                raise ServeRefused("a process of the server does not start again: see above")
    finally:
        processes.close()
    say("ended")
    return 0


def _ended_by_signals() -> Event:
    ended = Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: ended.set())
    return ended
