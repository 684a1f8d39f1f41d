"""Export of preference pairs as rows of TRL's conversational preference format.

`prompt`, `chosen` and `rejected` are lists of messages with only a role and a text: a tool call is
written into the text as the student writes it. Every row therefore has the same keys and types, so
loaders that infer a schema from the first rows (`datasets`) read files of any length, and a chat
template does not change the spelling of a call. Everything else is stored as JSON strings: `tools`
(TRL reads them so), the chat messages with their `tool_calls`, and the `provenance`.
"""

import json
from collections.abc import Sequence
from typing import Any

from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.pairs import PreferencePair, Provenance
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN, call_text, wire_arguments
from composer_mesh.rollouts.traces import Message

_PROVENANCE = fail_fast(Provenance)


def pair_record(pair: PreferencePair, tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the row of a pair; the key `tools` is present only if there are tools."""
    row: dict[str, Any] = {
        "prompt": [spoken_message(message) for message in pair.messages],
        "chosen": [{"role": "assistant", "content": pair.chosen_text}],
        "rejected": [{"role": "assistant", "content": pair.rejected_text}],
    }
    if tools:
        row["tools"] = _json(list(tools))
    return row | {
        "state_id": pair.state_id,
        "trace_id": pair.trace_id,
        "turn": pair.turn,
        "chosen_text": pair.chosen_text,
        "rejected_text": pair.rejected_text,
        "state_messages": _json(pair.messages),
        "chosen_message": _json(pair.chosen_message),
        "rejected_message": _json(pair.rejected_message),
        "n_teachers_agreeing": len(pair.teachers),
        "teachers": list(pair.teachers),
        "votes": pair.votes,
        "asked": pair.asked,
        "usd": float(pair.usd),
        "usd_known": pair.usd_known,
        "policy_version": pair.rejected_version,
        "provenance": _PROVENANCE.dump_json(pair.provenance).decode(),
    }


def spoken_message(message: Message) -> dict[str, str]:
    """Convert a chat message to a role and one text that includes its tool calls."""
    calls = message.get("tool_calls") or []
    parts = [_content(message.get("content")), *(_call(call["function"]) for call in calls)]
    return {"role": str(message["role"]), "content": "\n".join(part for part in parts if part)}


def _content(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return "" if content is None else str(content)


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        return call_text(function["name"], wire_arguments(arguments))
    except (ValueError, RecursionError):
        name = _json(function["name"])
        return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
