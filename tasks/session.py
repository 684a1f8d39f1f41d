"""A session: one running episode of a task, and the tools that the agent may call in it."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.tool import MARK, ExternalTool, ToolServers, ToolSpec


class SessionTask(Protocol):
    """What every session uses of its task: its tools, and the first messages."""

    tool_servers: ToolServers | None

    @property
    def own_tools(self) -> Mapping[str, ToolSpec]: ...

    @property
    def tool_specs(self) -> Mapping[str, ToolSpec | ExternalTool]: ...

    def prompt(self, row: Mapping[str, Any]) -> str | list[Message]: ...


@dataclass(frozen=True)
class Reply:
    """What a session says to an answer of the agent.

    `messages` are shown to the agent if the episode continues. `error` makes the answer an error
    site, which may get a hint.
    """

    messages: Sequence[Message] = field(default_factory=list)
    done: bool = True
    error: ToolError | None = None


class Session:
    """One running episode. Subclass it to keep state between tool calls.

    Methods with `@tool` are the agent's tools; `tools` adds functions that need no state. All
    methods may be plain or async. A session is used by one call at a time.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()

    task: SessionTask
    """The session's task, set before `start` is called. A subclass that uses more of it annotates
    it with the class of its task."""

    episode: Episode
    """The episode with its row; it is set before `start` is called."""

    conversation: Sequence[Message] = ()
    """The conversation with the agent's last message, for `reply` and tools to read; it is the
    episode's own, so nothing may be changed in it."""

    ended: bool = False
    """Whether a tool has ended the episode."""

    turn_reward: float | None = None
    """Reward of the turn under way; None where `add_reward` was not called."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises UnusableTask for a tool that would replace a method or attribute of `Session`."""
        super().__init_subclass__(**options)
        for name in (*dir(Session), *Session.__annotations__):
            if hasattr(inspect.getattr_static(cls, name, None), MARK):
                raise UnusableTask(
                    f"tool {name!r} of {cls.__name__} replaces Session.{name}: give the method "
                    f'another name, such as {name}_tool, with @tool(name="{name}")'
                )

    @property
    def row(self) -> Mapping[str, Any]:
        """The row that the episode was made from."""
        return self.episode.payload

    @property
    def episode_id(self) -> str:
        """What a server of the environment calls the episode, for rewards that come later."""
        return ""

    @property
    def own_tools(self) -> Mapping[str, ToolSpec]:
        """The tools that may be called now, by name, without those of MCP servers."""
        return self.task.own_tools

    def start(self) -> Any:
        """Prepare the session before the agent acts."""

    def opening(self) -> Any:
        """Return the first messages, or the text of a single one from the user."""
        return self.task.prompt(self.row)

    def reply(self, text: str) -> Any:
        """Answer a message of the agent that calls no tool.

        None ends the episode, a text or messages continue it, and a `Reply` says more. A
        `ToolError` continues it too, and marks the message as an error.
        """
        return None

    def close(self) -> Any:
        """Release what the session holds; called once, also if the episode was abandoned."""

    async def mcp(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the config's MCP servers by the name that agents see; return its text.

        Raises `ToolError` where the tool says that it failed, or is late.
        """
        spec = self.task.tool_specs.get(name)
        servers = self.task.tool_servers
        if not isinstance(spec, ExternalTool) or servers is None:
            raise UnusableTask(
                f"no MCP server offers {name!r}: add one under [[environment.mcp]], or correct the "
                "name"
            )
        return await servers.call(self.key, spec, arguments)

    @cached_property
    def key(self) -> str:
        """A name of this session, for servers that keep state for it."""
        return uuid.uuid4().hex

    def end(self) -> None:
        """End the episode after the call under way; for tools."""
        self.ended = True

    def add_reward(self, value: float) -> None:
        """Add to the reward of the agent's turn under way; for tools and `reply`."""
        self.turn_reward = (self.turn_reward or 0.0) + value
