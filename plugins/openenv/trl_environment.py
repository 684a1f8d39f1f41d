"""An OpenEnv server as TRL's `environment_factory`: a class generated from the server's tools.

    GRPOTrainer(..., environment_factory=environment_factory("http://localhost:8000"))

TRL finds tools as methods of a class, with annotations and a docstring, so each tool of the server
is one. Needs the extra `openenv`, and no TRL.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from composer_mesh.configs.validation import fail_fast, place_and_text
from composer_mesh.plugins.openenv.client.wire import (
    MOST_FRAME_BYTES,
    SERVER_FRAME,
    SESSION_PATH,
    ErrorFrame,
    ObservationFrame,
    Tool,
)
from composer_mesh.tasks.tool_methods import UnusableTools, tool_method

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed: pip install 'composer-mesh[openenv]'", name=error.name
    ) from None

__all__ = [
    "EnvironmentFactory",
    "SessionFailed",
    "UnusableTools",
    "environment_factory",
    "make_class",
]

RESET_ARGUMENTS = ("seed", "split", "index", "episode_id")
"""Columns of a data set that the server receives."""
ENDED = "The episode has ended."
_TOOLS = fail_fast(list[Tool])


class SessionFailed(RuntimeError):
    """A session was lost, or its environment has failed: its rollout has no reward."""


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes environments for TRL; it can be pickled, and its class is generated in each process."""

    url: str
    name: str
    token_env: str | None
    timeout_s: float

    def __call__(self) -> Any:
        return _environment_class(self)()


def environment_factory(
    url: str,
    *,
    name: str = "OpenEnvEnvironment",
    token_env: str | None = None,
    timeout_s: float = 60.0,
) -> EnvironmentFactory:
    """Return the factory for a server at an http or https URL.

    Rewards are logged under `name`. `token_env` names the environment variable with the server's
    token. A request that takes longer than `timeout_s` loses its session.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"url is {url!r}: write http://HOST:PORT")
    if not name.isidentifier():
        raise ValueError(f"name is {name!r}: write the name of a class")
    return EnvironmentFactory(url.rstrip("/"), name, token_env, timeout_s)


class ServerSession:
    """A session on the server, over a socket of its own."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._timeout_s = factory.timeout_s
        parts = urlsplit(factory.url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        address = urlunsplit((scheme, parts.netloc, parts.path + SESSION_PATH, "", ""))
        headers = {}
        if factory.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[factory.token_env]}"
        self._stack = ExitStack()
        try:
            self._socket: ClientConnection = self._stack.enter_context(
                connect(
                    address,
                    additional_headers=headers,
                    open_timeout=factory.timeout_s,
                    max_size=MOST_FRAME_BYTES,
                    ping_interval=None,  # a long generation is no lost session
                    compression=None,
                    proxy=None,
                )
            )
        except (OSError, WebSocketException) as error:
            raise SessionFailed(f"{factory.url} cannot be reached: {error}") from None

    def ask(self, kind: str, data: Mapping[str, Any]) -> ObservationFrame:
        """Return the observation for a request; raise SessionFailed for anything else."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            frame = SERVER_FRAME.validate_json(self._socket.recv(self._timeout_s))
        except (OSError, WebSocketException, ValidationError) as error:
            self.close()
            reason = place_and_text(error) if isinstance(error, ValidationError) else error
            raise SessionFailed(f"the session is lost: {type(error).__name__}: {reason}") from None
        if isinstance(frame, ErrorFrame):
            raise SessionFailed(f"{frame.data.code}: {frame.data.message}")
        if not isinstance(frame, ObservationFrame):
            raise SessionFailed(f"a {kind} was answered by a {frame.type}")
        return frame

    def close(self) -> None:
        """Close the socket, which ends the session."""
        self._stack.close()


class TrlEnvironment:
    """What all generated classes share; TRL calls what has no underscore."""

    _factory: EnvironmentFactory

    def __init__(self) -> None:
        self._session: ServerSession | None = None
        self._failure: SessionFailed | None = None
        self._reward: float | None = None
        self._done = False

    def reset(self, **row: Any) -> str:
        """Begin an episode; return its first text, which TRL adds to the prompt."""
        if self._failure is not None and self._session is not None:
            self._session.close()
            self._session = None
        self._failure, self._reward, self._done = None, None, False
        if self._session is None:
            self._session = ServerSession(self._factory)
        arguments = {name: row[name] for name in RESET_ARGUMENTS if row.get(name) is not None}
        return self._read(self._session.ask("reset", arguments))

    def get_reward(self) -> float:
        """Return the reward of the episode, which ends here if it has not.

        Raises SessionFailed for one that was lost or has failed: TRL has informed the model and
        continued, and no reward is right.
        """
        if self._failure is None and not self._done:
            self._act({"type": "finish"})
        if self._failure is not None:
            raise self._failure
        if self._reward is None:
            raise SessionFailed("the environment ended the episode without a reward")
        return self._reward

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        if self._done:
            return ENDED
        given = {name: value for name, value in arguments.items() if value is not None}
        text = self._act({"type": "call_tool", "tool_name": tool, "arguments": given})
        if self._failure is not None:
            raise self._failure
        return text or ENDED

    def _act(self, action: Mapping[str, Any]) -> str:
        """Send an action; a failure is kept for `get_reward`."""
        if self._failure is not None or self._session is None:
            return ""
        try:
            return self._read(self._session.ask("step", action))
        except SessionFailed as failure:
            self._failure = failure
            return ""

    def _read(self, frame: ObservationFrame) -> str:
        if frame.data.done:
            self._done, self._reward = True, frame.data.reward
        text = frame.data.observation.get("text", "")
        return text if isinstance(text, str) else json.dumps(text)

    def __del__(self) -> None:
        session: ServerSession | None = getattr(self, "_session", None)
        if session is not None:
            session.close()


@lru_cache(maxsize=32)
def _environment_class(factory: EnvironmentFactory) -> type[TrlEnvironment]:
    """Return the class for a server's tools, which are requested once a process."""
    session = ServerSession(factory)
    try:
        listed = session.ask("step", {"type": "list_tools"}).data.observation.get("tools")
    finally:
        session.close()
    return make_class(factory, _TOOLS.validate_python(listed))


def make_class(factory: EnvironmentFactory, tools: Sequence[Tool]) -> type[TrlEnvironment]:
    """Return a class with a method for each tool. Raises UnusableTools."""
    methods: dict[str, Any] = {
        tool.name: tool_method(tool.name, tool.description, tool.input_schema) for tool in tools
    }
    return type(factory.name, (TrlEnvironment,), {**methods, "_factory": factory})
