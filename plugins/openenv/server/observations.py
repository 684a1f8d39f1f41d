"""What a client reads after a reset and a step: a text, the result of a call, the metadata.

The messages with their roles are in the state of a turn. Rows and verified answers are in neither.

Tools are listed with one more that says a text: clients that know tools alone (MCP, OpenEnv's tool
client, TRL) could not answer otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.plugins.openenv.client.wire import (
    ERROR_FACTS,
    ERROR_KIND,
    HINT_TEMPLATE_KEY,
    NO_ERROR,
    ToolErrorType,
)
from composer_mesh.plugins.openenv.server.validation import invalid
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.tasks.task import Task

ANSWER = "answer"
"""The tool that says a text; it has a `_` more for each tool of the task with that name."""
TEXT = "text"


def listed_tools(task: Task) -> list[dict[str, Any]]:
    """Return the tools in OpenEnv's format."""
    own = [
        {
            "name": one["function"]["name"],
            "description": one["function"]["description"],
            "input_schema": one["function"]["parameters"],
        }
        for one in task.tools
    ]
    schema = {
        "type": "object",
        "properties": {TEXT: {"type": "string", "description": "What you say."}},
        "required": [TEXT],
        "additionalProperties": False,
    }
    about = "Say a text without calling another tool, such as your final answer."
    return [*own, {"name": answer_name(task), "description": about, "input_schema": schema}]


def answer_name(task: Task) -> str:
    """Return the name of the tool that says a text."""
    taken = {one["function"]["name"] for one in task.tools}
    name = ANSWER
    while name in taken:
        name += "_"
    return name


def answer_text(arguments: dict[str, Any]) -> str:
    """Return what a call of that tool says; raise Refused for other arguments."""
    if arguments.keys() != {TEXT} or not isinstance(arguments[TEXT], str):
        raise invalid(f"say one text: {{{TEXT!r}: TEXT}}")
    return str(arguments[TEXT])


ERROR_TYPES: Mapping[str, ToolErrorType] = {
    "unknown_tool": ToolErrorType.TOOL_NOT_FOUND,
    "missing_argument": ToolErrorType.INVALID_ARGS,
    "unknown_argument": ToolErrorType.INVALID_ARGS,
    "wrong_type": ToolErrorType.INVALID_ARGS,
    "bad_value": ToolErrorType.INVALID_ARGS,
    "malformed_call": ToolErrorType.INVALID_ARGS,
    "tool_timeout": ToolErrorType.TIMEOUT,
}
"""Error types of OpenEnv for error kinds of calls that did not reach their tool."""


def observation(
    messages: Sequence[Message],
    metadata: Mapping[str, Any],
    outcome: Outcome | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an observation; with an outcome it is the last one, and has the reward."""
    about = dict(metadata)
    if outcome is not None:
        about |= {"rewards": dict(outcome.rewards), "success": outcome.success}
    seen = {"text": text_of(messages), **(more or {})}
    return {
        "observation": {**seen, "metadata": about},
        "reward": None if outcome is None else outcome.reward,
        "done": outcome is not None,
        "metadata": about,
    }


def error_metadata(error: ErrorSite | None) -> dict[str, Any]:
    """Return the metadata of an error site, or that there is none."""
    if error is None:
        return {ERROR_KIND: NO_ERROR}
    return {
        ERROR_KIND: error.error_kind,
        HINT_TEMPLATE_KEY: error.hint_template_key,
        ERROR_FACTS: dict(error.data),
    }


def call_result(name: str, result: StepResult) -> dict[str, Any]:
    """Return the fields of a `call_tool` observation."""
    text = text_of(result.messages)
    kind = None if result.error is None else ERROR_TYPES.get(result.error.error_kind)
    failed = result.error is not None and result.error.error_kind != "no_answer"
    content = [{"type": "text", "text": text}] if text else []
    return {
        "tool_name": name,
        "result": {
            "content": content,
            "structured_content": None,
            "data": text,
            "is_error": failed,
        },
        "error": None if kind is None else {"error_type": kind.value, "message": text},
    }


def text_of(messages: Sequence[Message]) -> str:
    """Return the texts of messages, one below the other."""
    texts = (one.get("content") for one in messages)
    return "\n".join(one for one in texts if isinstance(one, str))
