"""The process in the environment of verifiers that plays episodes, many at once.

    DriverProcess -- orders, JSON lines --> driver.py --> episodes

It ends with this process, and with all that it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from composer_mesh.configs.validation import validated
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.plugins.frameworks.verifiers.episodes import (
    DriverEpisode,
    DriverError,
    EpisodeLost,
    failure,
)
from composer_mesh.plugins.frameworks.verifiers.line_program import LineProgram
from composer_mesh.tasks.errors import UnusableTask

PROGRAM = Path(__file__).with_name("driver.py")
GRACE_S = 5.0
"""Seconds that the driver has to end its episodes before it is killed."""
NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
LOOPBACK = "127.0.0.1,localhost"


class DriverProcess:
    """A driver, from its start until this object is gone; used from any event loop."""

    def __init__(self, python: Path, settings: Mapping[str, Any], start_s: float) -> None:
        """Start it. Waits until it can play; raises UnusableTask if it cannot."""
        self._program = LineProgram([str(python), "-P", str(PROGRAM)], environ(python), Path.cwd())
        self._answers = Answers()
        self.close = weakref.finalize(self, self._program.close, GRACE_S)
        reading = threading.Thread(
            target=_read, args=(self._program, self._answers), name="verifiers", daemon=True
        )
        reading.start()
        self._names = count()
        self._program.send(json.dumps(dict(settings)))
        try:
            self.name = str(self._answers.expect("").result(start_s)["ready"])
        except TimeoutError:
            self.close()
            raise UnusableTask(
                f"the environment of verifiers did not start within {start_s:g} s: raise start_s "
                "in rollouts.options"
            ) from None
        except EpisodeLost as lost:
            self.close()
            raise UnusableTask(f"the environment of verifiers did not start: {lost}") from None

    @property
    def lost(self) -> bool:
        """Whether the process has ended."""
        return self._answers.lost is not None

    async def play(self, task: int, base_url: str, api_key: str) -> DriverEpisode:
        """Play one episode. Waits for it; cancelled, it is cancelled there.

        Raises EpisodeLost or EpisodeFailed.
        """
        name = f"{next(self._names)}"
        answer = self._answers.expect(name)
        order = {"id": name, "task": task, "base_url": base_url, "api_key": api_key}
        await self._send(order)
        try:
            said = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            await self._send({"id": name, "cancel": True})
            raise
        if "episode" not in said:
            raise failure([validated(DriverError, said["error"])])
        return validated(DriverEpisode, said["episode"])

    async def _send(self, order: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._program.send, json.dumps(order))
        except (OSError, ValueError):  # it has ended; whoever waits is told by `_read`
            return


class Answers:
    """Those who wait for the driver, by the names of their orders."""

    def __init__(self) -> None:
        self._waiting: dict[str, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self.lost: EpisodeLost | None = None

    def expect(self, name: str) -> Future[dict[str, Any]]:
        """Return the coming answer to an order; "" is that of the start."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.lost is not None:
                answer.set_exception(EpisodeLost(*self.lost.args))
            else:
                self._waiting[name] = answer
        return answer

    def give(self, said: dict[str, Any]) -> None:
        """Give an answer to whoever waits for it, if anyone still does."""
        with self._lock:
            answer = self._waiting.pop(said.get("id", ""), None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(said)

    def lose(self, why: str) -> None:
        """Fail all that wait, and all that come."""
        with self._lock:
            self.lost = EpisodeLost(why)
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EpisodeLost(why))


def environ(python: Path) -> dict[str, str]:
    """Return the environment variables of the driver."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    direct = ",".join(filter(None, [kept.get("NO_PROXY", kept.get("no_proxy")), LOOPBACK]))
    return {
        **kept,
        "PATH": os.pathsep.join(filter(None, [str(python.parent), kept.get("PATH")])),
        "PYTHONPATH": kept.get(IMPORT_PATHS, ""),
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _read(program: LineProgram, answers: Answers) -> None:
    """Pass on what the driver says until it ends."""
    wrong = ""
    for line in program.lines():
        try:
            answers.give(_checked(line))
        except ValueError as error:
            wrong = str(error)
            break
    status = program.close(GRACE_S)
    why = wrong or program.last_words() or "it said nothing"
    answers.lose(f"the process of verifiers has ended with status {status}: {why}")


def _checked(line: str) -> dict[str, Any]:
    """Return an answer; raise ValueError for what is none, or says that nothing can be played."""
    try:
        said = parsed_json(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"it said {line[:80]!r}, which is no answer")
    if "unusable" in said:
        raise ValueError(str(said["unusable"]))
    return said
