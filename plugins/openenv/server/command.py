"""The command: offers a task to others until Ctrl-C, in processes that are replaced when they fail.

Each process has a thread here, which asks it once a second whether it serves: a dead or hung one is
replaced. `ServeOptions` says where a server listens, and what its sessions may take.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from threading import Event

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.configs.load import resolve_config, table_of
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import add_import_paths, python_module
from composer_mesh.mesh.private_folder import own_private_folder
from composer_mesh.mesh.programs import AnsweringProgram, ProgramFailed
from composer_mesh.services.checks.keys import held_keys
from composer_mesh.services.web.http_server import listening_socket
from composer_mesh.services.web.options import (
    ListenOptions,
    ServeRefused,
    checked_token,
)


class ServeOptions(ListenOptions):
    """Where a task is served, and the bounds of its sessions. `max_sessions` counts all processes.

    A session that asks for nothing for `session_timeout_s` is ended.
    """

    port: int = Field(default=8000, ge=0, le=65535)
    processes: int = Field(default=1, ge=1, le=256)
    session_timeout_s: float = Field(default=900.0, gt=0, le=7 * 86400)
    max_sessions: int = Field(default=10_000, ge=1, le=10_000_000)


class WorkerStart(BaseModel):
    """What a server process reads first. The token is in no command and no environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: ServeOptions
    config: Config
    folder: str
    number: int
    token: str = Field(default="", repr=False)


START_S = 120.0
ANSWER_S = 30.0
STOP_S = 20.0
EVERY_S = 1.0
MOST_FAST_FAILURES = 5
"""Starts in a row that may fail before the server gives up."""
COMMAND = python_module("composer_mesh.plugins.openenv.server.worker")


def start_program(listener: int) -> AnsweringProgram:
    """Start a server process on the descriptor of a listening socket; it waits for its line."""
    return AnsweringProgram(
        (*COMMAND, str(listener)), os.environ, shows_errors=True, pass_fds=(listener,)
    )


class ServerProcesses:
    """The processes of one server, in a `with` block that ends them."""

    def __init__(
        self,
        starts: list[WorkerStart],
        report: Callable[[str], None],
        make: Callable[[], AnsweringProgram],
        every_s: float = EVERY_S,
    ) -> None:
        self._starts, self._report, self._make = starts, report, make
        self._every_s = every_s
        self._programs: dict[int, AnsweringProgram] = {}
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()
        self.gave_up = threading.Event()
        """Set where a process does not start any more."""

    def start(self) -> None:
        """Start all. Waits until each serves; raises ServeRefused with the reason of the first."""
        with ThreadPoolExecutor(len(self._starts)) as together:
            started = [together.submit(self._started, one) for one in self._starts]
        try:
            for starting in started:
                starting.result()
        except ProgramFailed as failed:
            self.close()
            raise ServeRefused(f"the server does not start: {failed.said}") from None
        for start in self._starts:
            thread = threading.Thread(target=self._keep, args=(start,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ask all to close their sessions and end; kill those that do not in time."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        if self._programs:
            with ThreadPoolExecutor(len(self._programs)) as together:
                list(together.map(self._stop, list(self._programs)))

    def _started(self, start: WorkerStart) -> None:
        try:
            program = self._make()
        except OSError as error:
            raise ProgramFailed(COMMAND, f"it cannot be started ({error.strerror})") from error
        self._programs[start.number] = program
        program.ask(start.model_dump_json().encode(), START_S)

    def _keep(self, start: WorkerStart) -> None:
        failures = 0
        while not self._ending.wait(self._every_s * 2**failures):
            try:
                if failures:
                    self._started(start)
                self._programs[start.number].ask(b"status", ANSWER_S)
                failures = 0
            except ProgramFailed as failed:
                failures += 1
                self._report(f"process {start.number} is replaced: {failed}")
                if (broken := self._programs.pop(start.number, None)) is not None:
                    broken.close()
                if failures > MOST_FAST_FAILURES:
                    self.gave_up.set()
                    return

    def _stop(self, number: int) -> None:
        program = self._programs.pop(number)
        try:
            program.ask(b"stop", STOP_S)
        except ProgramFailed as failed:
            self._report(f"process {number} was killed: {failed}")
        finally:
            program.close()


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
    token = checked_token(options, token_env)
    config = resolve_config(table_of(target, "play"), overrides, target, model_later=True)
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
