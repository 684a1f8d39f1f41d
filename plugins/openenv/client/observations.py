"""What an environment says, as the agent reads it, and the errors that it tells.

Observations are untrusted: their texts are data for the agent, and what names an error or a hint is
taken only in a known form. Metadata is never shown to the agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from pydantic import ValidationError

from composer_mesh.configs.validation import validated
from composer_mesh.plugins.openenv.client.wire import (
    ACCEPTED_ACTIONS,
    ERROR_FACTS,
    ERROR_KIND,
    FINISH,
    HINT_TEMPLATE_KEY,
    MESSAGE,
    NO_ERROR,
    CallToolObservation,
    ObservationData,
    ToolErrorType,
)
from composer_mesh.tasks.errors import ToolError

KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
MOST_FACTS, LONGEST_FACT = 20, 1_000
GENERAL_TEMPLATE = "tool_error"


class UnreadableObservation(ValueError):
    """An observation that has not the form of the environment's kind."""


def text_of(data: ObservationData, field: str | None) -> str:
    """Return an observation as text: the named field, its only text, or all of it as JSON."""
    said = {key: value for key, value in data.observation.items() if key != "metadata"}
    if field is not None:
        if field not in said:
            raise UnreadableObservation(f"an observation has no field {field!r}")
        said = {field: said[field]}
    texts = [value for value in said.values() if isinstance(value, str)]
    if len(said) == 1 and texts:
        return texts[0]
    return json.dumps(said, ensure_ascii=False) if said else ""


def tool_result(data: ObservationData) -> tuple[str, ToolError | None]:
    """Return the result of a call as text, and the agent's error where the result is one.

    Raises UnreadableObservation for one that is no result of a call.
    """
    try:
        called = validated(CallToolObservation, data.observation)
    except ValidationError:
        raise UnreadableObservation("a call was answered by no result of a call") from None
    if called.error is not None:
        failed = _failed_call(called.tool_name, called.error.error_type, called.error.message)
        return failed.text, failed
    result = called.result
    if isinstance(result, Mapping) and "content" in result:
        text = _content(result)
        is_error = result.get("is_error") is True or result.get("isError") is True
        return text, ToolError("tool_failed", text) if is_error else None
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), None


def told_error(data: ObservationData, templates: Mapping[str, str]) -> ToolError | None:
    """Return the error of the agent that an observation's metadata names, by our extension.

    Its hint template is used if it is one of `templates` and the facts fill it.
    """
    metadata = data.metadata or data.observation.get("metadata")
    if not isinstance(metadata, Mapping):
        return None
    kind = metadata.get(ERROR_KIND)
    if not isinstance(kind, str) or kind == NO_ERROR or not KIND.fullmatch(kind):
        return None
    facts = _facts(metadata.get(ERROR_FACTS))
    asked = metadata.get(HINT_TEMPLATE_KEY)
    for key in (asked, kind):
        if isinstance(key, str) and key in templates and _fields(templates[key]) <= facts.keys():
            return ToolError(kind, "", facts, key)
    return ToolError(kind, "", facts, GENERAL_TEMPLATE)


def has_error_kind(data: ObservationData) -> bool:
    """Whether the environment says of its answers if the agent was wrong."""
    metadata = data.metadata or data.observation.get("metadata")
    return isinstance(metadata, Mapping) and ERROR_KIND in metadata


def accepted_actions(data: ObservationData) -> frozenset[str]:
    """Return what an environment says at a reset that it takes besides calls, by our extension."""
    told = (data.metadata or {}).get(ACCEPTED_ACTIONS)
    return frozenset(one for one in (MESSAGE, FINISH) if isinstance(told, list) and one in told)


def _failed_call(tool: str, error: str, message: str) -> ToolError:
    """Return the error of a call that the environment did not carry out.

    Raises UnreadableObservation where that was no error of the agent.
    """
    if error == ToolErrorType.TIMEOUT:
        return ToolError("tool_timeout", message or f"{tool} took too long", {"tool": tool})
    agents = (
        ToolErrorType.INVALID_ARGS,
        ToolErrorType.TOOL_NOT_FOUND,
        ToolErrorType.EXECUTION_ERROR,
    )
    if error in agents:
        return ToolError(f"remote_{error}", message or error)
    raise UnreadableObservation(f"a call failed with {error[:LONGEST_FACT]!r}: {message}")


def _content(result: Mapping[str, Any]) -> str:
    """Return the texts of a result of MCP; other content is named."""
    parts = result["content"]
    if not isinstance(parts, list):
        raise UnreadableObservation("a result has a content that is no list")
    texts = [_part(part) for part in parts]
    if not texts and result.get("structured_content") is not None:
        texts = [json.dumps(result["structured_content"], ensure_ascii=False)]
    return "\n".join(texts)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"[{str(kind)[:20]}]"


def _facts(facts: Any) -> dict[str, str]:
    if not isinstance(facts, Mapping):
        return {}
    named = [(name, text) for name, text in facts.items() if KIND.fullmatch(str(name))]
    return {str(name): str(text)[:LONGEST_FACT] for name, text in named[:MOST_FACTS]}


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template) if field is not None}
