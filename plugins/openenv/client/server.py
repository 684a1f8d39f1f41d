"""What an OpenEnv server says of itself: its health, its action's schema, its tools and its tasks.

Queried once in each process, before episodes. Every body is bounded and nothing is followed. Needs
the extra `openenv`.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from composer_mesh.configs.validation import fail_fast, first_error, validated
from composer_mesh.plugins.openenv.client.connection import (
    OpenEnvConnection,
    full,
    open_and_ask,
    reason_of,
)
from composer_mesh.plugins.openenv.client.errors import (
    ConnectionLost,
    ProtocolViolation,
    ServerTimeout,
    shown,
)
from composer_mesh.plugins.openenv.client.options import OpenEnvOptions
from composer_mesh.plugins.openenv.client.wire import (
    ERROR_PENALTY,
    HEALTH_PATH,
    LIST_PATH,
    MESSAGES,
    METADATA_PATH,
    NUM_TASKS_PATH,
    REWARDS_PATH,
    SCHEMA_PATH,
    SPLITS_PATH,
    ErrorFrame,
    ListToolsAction,
    ObservationFrame,
    ResetFrame,
    ServedRewards,
    StateAt,
    StateFrame,
    StateReply,
    StepFrame,
    Tool,
)
from composer_mesh.tasks.errors import UnusableTask

T = TypeVar("T")
MOST_TASKS = 10**9
ABSENT = frozenset({404, 405, 501})
"""Statuses of a server or an environment without a Task API."""

TOOLS = fail_fast(list[Tool])


@dataclass(frozen=True)
class TaskSplit:
    """A split of the Task API: `kind` is "train", "validation" or "test"."""

    name: str
    kind: str


class Server:
    """A server at the address of `options`; each question may take `connect_s` and `reset_s`."""

    def __init__(self, options: OpenEnvOptions, headers: Mapping[str, str], limit_s: float) -> None:
        self._options, self._headers, self._limit_s = options, dict(headers), limit_s

    def check_health(self) -> None:
        """Raise ServerFailure where nobody answers, or the server is not healthy."""
        body = self._required(HEALTH_PATH)
        if not isinstance(body, dict) or body.get("status") != "healthy":
            raise self._violation(f"is not healthy: {HEALTH_PATH} says {shown(body)}")

    def error_penalty(self) -> float:
        """Return what the environment takes for each error of the agent, by our extension."""
        body = self._get(METADATA_PATH)
        penalty = body.get(ERROR_PENALTY) if isinstance(body, dict) else None
        return float(penalty) if isinstance(penalty, int | float) else 0.0

    def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the environment's action."""
        body = self._required(SCHEMA_PATH)
        schema = body.get("action") if isinstance(body, dict) else None
        if not isinstance(schema, dict):
            raise self._violation(f"has no schema of its action at {SCHEMA_PATH}")
        return schema

    def tools(self) -> list[Tool]:
        """Return the tools that the environment lists. Waits while the server is full."""
        frame = self._in_a_session(
            StepFrame(data=ListToolsAction().model_dump(exclude={"metadata"}))
        )
        if isinstance(frame, ErrorFrame):
            raise self._violation(f"lists no tools ({frame.data.code[:40]}: {reason_of(frame)})")
        said = frame.data.observation.get("tools") if isinstance(frame, ObservationFrame) else None
        try:
            return TOOLS.validate_python(said)
        except ValidationError as error:
            problem = first_error(error)["msg"]
            raise self._violation(f"lists tools of another form ({shown(problem)})") from None

    def splits(self) -> tuple[str, list[TaskSplit]] | None:
        """Return the environment's name and its splits; None without a Task API."""
        name = self._options.env or self._listed_name()
        if name is None:
            return None
        body = self._get(SPLITS_PATH.format(env=quote(name, safe="")))
        if body is None:
            return None
        if not isinstance(body, list) or len(body) > 1000:
            raise self._violation("lists splits of another form")
        return name, [_split(one) for one in body]

    def num_tasks(self, env: str, split: str) -> int | None:
        """Return the number of tasks of a split; None where they are made and not counted."""
        path = NUM_TASKS_PATH.format(env=quote(env, safe=""))
        body = self._get(path, {"split": split})
        if body is None:
            return None
        count = body.get("num_tasks") if isinstance(body, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_TASKS:
            raise self._violation(f"says that split {split!r} has {shown(count)} tasks")
        return count

    def tells_states(self, reset: Mapping[str, Any]) -> bool:
        """Whether the server tells what the agent had read at a turn, by our extension."""
        frame = self._in_a_session(ResetFrame(data=dict(reset)), StateFrame(data=StateAt(turn=0)))
        if not isinstance(frame, StateReply):
            return False
        return isinstance((frame.data.model_extra or {}).get(MESSAGES), list)

    def rewards_after(self, number: int) -> ServedRewards:
        """Return rewards that came after the ends of their episodes, and after one by its number.

        They are the first ones, in order. By our extension; raises ServerFailure without it.
        """
        body = self._required(f"{REWARDS_PATH}?after={number}")
        try:
            served = validated(ServedRewards, body)
        except ValidationError as error:
            problem = first_error(error)["msg"]
            raise self._violation(f"tells rewards of another form ({shown(problem)})") from None
        numbers = [number, *(one.number for one in served.rewards)]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise self._violation("reports rewards out of order, or some twice")
        most = self._options.most_reward
        for one in served.rewards:
            if abs(one.reward) > most:
                raise self._violation(f"reports a reward of {one.reward:g}, beyond {most:g}")
        return served

    def _in_a_session(self, *questions: Any) -> Any:
        """Return the answer to the last of some questions, in a session of their own."""

        async def last_answer(connection: OpenEnvConnection) -> Any:
            until = asyncio.get_running_loop().time() + self._limit_s
            for question in questions:
                frame = await connection.ask(question, until, question.type)
                if isinstance(frame, ErrorFrame) and (failure := full(self._options.url, frame)):
                    raise failure
            return frame

        async def all_of_it() -> Any:
            connection, frame = await open_and_ask(
                self._options, self._headers, self._limit_s, last_answer
            )
            await connection.close()
            return frame

        return _waited(all_of_it())

    def _listed_name(self) -> str | None:
        body = self._get(LIST_PATH)
        names = body if isinstance(body, list) else []
        if len(names) > 1:
            raise UnusableTask(
                f"OpenEnv server {self._options.url} has {len(names)} environments: name one of "
                f"{shown(', '.join(map(str, names[:20])))} in data.options.env"
            )
        return str(names[0]) if names else None

    def _required(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        found = self._get(path, body)
        if found is None:
            raise self._violation(
                f"has no {path}: it is not an OpenEnv server, or the path is wrong"
            )
        return found

    def _get(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON at a path, posting a body if there is one; None where it is absent."""
        return _waited(self._fetched(path, body))

    async def _fetched(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with asyncio.timeout(self._limit_s + self._options.connect_s):
                return await self._exchange(path, body)
        except (TimeoutError, httpx.TimeoutException):
            raise ServerTimeout(self._options.url, f"did not answer {path} in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = f"cannot be queried for {path} ({type(error).__name__}: {shown(error)}): "
            raise ConnectionLost(
                self._options.url, f"{reason}start the server, or correct data.options.url"
            ) from None

    async def _exchange(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {**self._headers, "Accept-Encoding": "identity", "Accept": "application/json"}
        async with httpx.AsyncClient(
            timeout=self._options.connect_s,
            follow_redirects=False,
            trust_env=not self._options.is_loopback,
            verify=self._options.url.startswith("https://"),  # certificates are slow to load
        ) as client:
            method, url = ("GET" if body is None else "POST"), self._options.url + path
            async with client.stream(method, url, json=body, headers=headers) as response:
                if response.status_code in ABSENT:
                    return None
                if response.status_code != 200:
                    raise self._violation(f"answered {path} with status {response.status_code}")
                return self._decoded(path, await self._bytes(response))

    async def _bytes(self, response: httpx.Response) -> bytes:
        """Return a body as it was sent, within the bound of a frame."""
        found = bytearray()
        async for part in response.aiter_raw():
            found += part
            if len(found) > self._options.most_bytes:
                raise self._violation(f"answered with more than {self._options.most_bytes:,} bytes")
        return bytes(found)

    def _decoded(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._violation(f"answered {path} with what is not JSON") from None

    def _violation(self, reason: str) -> ProtocolViolation:
        return ProtocolViolation(self._options.url, reason)


def _split(one: Any) -> TaskSplit:
    if isinstance(one, Mapping):
        return TaskSplit(str(one.get("name", ""))[:100], str(one.get("type", ""))[:100])
    return TaskSplit(str(one)[:100], "")


def _waited(work: Awaitable[T]) -> T:
    """Run a coroutine in a thread of its own: the caller may have an event loop."""

    async def awaited() -> T:
        return await work

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, awaited()).result()
