"""A session: one running episode of a task, and the tools that the agent may call in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ToolError

if TYPE_CHECKING:
    from composer_mesh.tasks.task import Task
    from composer_mesh.tasks.tool import ToolSpec


@dataclass(frozen=True)
class Reply:
    """What a session says to an answer of the agent.

    `messages` are shown to the agent if the episode goes on. `error` makes the answer an error
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

    task: Task
    """The session's task; it is set before `start` is called."""

    episode: Episode
    """The episode with its row; it is set before `start` is called."""

    ended: bool = False
    """Whether a tool has ended the episode."""

    @property
    def row(self) -> Mapping[str, Any]:
        """The row that the episode was made from."""
        return self.episode.payload

    @property
    def tool_specs(self) -> Mapping[str, ToolSpec]:
        """The tools that may be called now, by name; those of the task."""
        return self.task.tool_specs

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

    def end(self) -> None:
        """End the episode after the call under way; for tools."""
        self.ended = True
