"""The process in the environment of verifiers that plays episodes, many at once.

    DriverProcess -- orders, JSON lines --> driver.py --> episodes

It ends with this process, and with all that it started. An episode that did not finish has no
reward: its error is infrastructure or data, by the class that verifiers gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.configs.validation import validated
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.mesh.programs import MOST_ANSWER_BYTES, TiedProgram
from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.tasks.errors import TaskError, UnusableTask

INFRASTRUCTURE = frozenset(
    {"InterceptionError", "ProviderError", "SandboxError", "ToolsetError", "TunnelError"}
)
"""Error classes of verifiers that say nothing about the task, its code or what was sampled."""
PASSING = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed."""


class EpisodeFailed(TaskError):
    """An episode of verifiers failed by its task, its harness or what the policy did."""


class EpisodeLost(TaskError):
    """An episode of verifiers failed by a process, a sandbox or a connection."""

    failure_class = "infrastructure"


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DriverError(_Said):
    """An error as verifiers recorded it."""

    type: str
    message: str
    status_code: int | None = None

    @property
    def is_infrastructure(self) -> bool:
        """Whether the same episode may succeed elsewhere or later."""
        refused = self.status_code is not None and 400 <= self.status_code < 500
        return self.type in INFRASTRUCTURE and (not refused or self.status_code in PASSING)


class DriverTrace(_Said):
    """One agent's run; its requests had the header X-Session-ID `session`."""

    session: str = Field(min_length=1)
    agent: str
    trainable: bool
    ok: bool
    reward: float
    rewards: dict[str, float | None]
    metrics: dict[str, float | None]
    stop: str | None

    def values(self) -> dict[str, float]:
        """Return the unweighted rewards and, as `metric/NAME`, the metrics; raise EpisodeFailed."""
        missing = [name for name, value in self.rewards.items() if value is None]
        if missing:
            raise EpisodeFailed(
                f"rewards {', '.join(missing)} of agent {self.agent} were not computed: it stopped "
                f"by {self.stop}"
            )
        found = {**self.rewards, **{f"metric/{name}": v for name, v in self.metrics.items()}}
        return {name: value for name, value in found.items() if value is not None}


class DriverEpisode(_Said):
    """An episode; `complete` is the environment's own verdict."""

    complete: bool
    errors: list[DriverError]
    traces: list[DriverTrace]

    def scored(self) -> list[DriverTrace]:
        """Return the finished runs of trained agents; raise EpisodeLost or EpisodeFailed."""
        if not self.complete:
            raise failure(self.errors)
        found = [trace for trace in self.traces if trace.ok and trace.trainable]
        if not found:
            raise EpisodeFailed("the episode finished without a run of an agent that is trained")
        return found


def failure(errors: list[DriverError]) -> EpisodeFailed | EpisodeLost:
    """Return the error of an episode; one error of infrastructure makes it that."""
    first = next((one for one in errors if one.is_infrastructure), None)
    if first is not None:
        return EpisodeLost(_text(first))
    if not errors:
        return EpisodeFailed("the environment says that the episode is not complete, and not why")
    return EpisodeFailed(_text(errors[-1]))


def _text(error: DriverError) -> str:
    status = "" if error.status_code is None else f" (status {error.status_code})"
    return f"verifiers: {error.type}{status}: {error.message}"


LAST_LINES, LONGEST_LINE = 20, 4096


class LineProgram:
    """A program that receives lines, and says lines whenever it has some.

    It ends with this process, with all that it started. What it writes to its error stream goes to
    the stream of this process too; the end of it is in `last_words`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        """Start it; raises `ProgramFailed` if it is not there."""
        self._program = TiedProgram(command, env, folder)
        self._input, self._output, self._errors = self._program.streams
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._sending, self._closing, self._closed = threading.Lock(), threading.Lock(), False
        self._listening = threading.Thread(target=self._listen, name=command[0], daemon=True)
        self._listening.start()

    def send(self, line: str) -> None:
        """Tell it a line. Waits while it does not read; raises BrokenPipeError after its end."""
        with self._sending:
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    def lines(self) -> Iterator[str]:
        """Yield its lines until it ends, or says one that is too long."""
        with self._output as said:
            while (line := said.readline(MOST_ANSWER_BYTES)).endswith(b"\n"):
                yield line.decode("utf-8", "replace")

    def last_words(self) -> str:
        """Return the end of its error stream; call it after its end."""
        self._listening.join()
        return "".join(self._said)[-2000:].strip()

    def close(self, grace_s: float) -> int:
        """End its input, kill it after so many seconds, and return its status. May be repeated."""
        with self._closing:
            if not self._closed:
                self._closed = True
                if self._sending.acquire(timeout=grace_s):
                    self._end_input()
                    self._sending.release()
                self._program.ends_within(grace_s)
                self._program.close()
            status = self._program.wait()
            self._end_input()
            return status

    def _end_input(self) -> None:
        with contextlib.suppress(OSError):  # it has ended before
            self._input.close()

    def _listen(self) -> None:
        with self._errors as errors:
            while line := errors.readline(LONGEST_LINE):
                text = line.decode("utf-8", "replace")
                self._said.append(text)
                sys.stderr.write(text)


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
        except (OSError, ValueError):  # it has ended; whoever waits is informed by `_read`
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
        raise ValueError(f"it said {line[:80]!r}, which is not an answer")
    if "unusable" in said:
        raise ValueError(str(said["unusable"]))
    return said
