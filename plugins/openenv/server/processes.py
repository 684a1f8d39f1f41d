"""Keeps the processes of an environment server running: a dead or hung one is replaced.

Each has a thread here, which asks it once a second whether it serves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import AnsweringProgram, ProgramFailed
from composer_mesh.plugins.openenv.server.options import WorkerStart
from composer_mesh.services.web.options import ServeRefused

START_S = 120.0
ANSWER_S = 30.0
STOP_S = 20.0
EVERY_S = 1.0
MOST_FAST_FAILURES = 5
"""Starts in a row that may fail before the server gives up."""
COMMAND = python_module("composer_mesh.plugins.openenv.server.worker")


class Program(Protocol):
    """A process that answers lines."""

    def ask(self, line: bytes, deadline_s: float) -> bytes: ...

    def close(self) -> None: ...


def start_program(listener: int) -> Program:
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
        make: Callable[[], Program],
        every_s: float = EVERY_S,
    ) -> None:
        self._starts, self._report, self._make = starts, report, make
        self._every_s = every_s
        self._programs: dict[int, Program] = {}
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
