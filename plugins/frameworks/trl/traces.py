"""Traces of TRL's own rollouts: of its tools and environments, from the ids that it trains.

TRL keeps a tool's failure as the text of an error. Here it becomes an error site at the turn whose
call failed, so that tools need not change to be taught at their errors. Imports no TRL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from composer_mesh.plugins.frameworks.trl.environments import TaskEnvironment
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn

FAILED = "{'error': "
"""How TRL writes the exception of a tool."""

MISSING = "not found."
LONGEST_ERROR = 2_000
"""Characters of an error that a hint may quote."""


@dataclass(frozen=True)
class Completion:
    """One row of TRL: its ids, which of them the model sampled, and the messages they make.

    `environment` is the row's, where TRL played one.
    """

    prompt_ids: list[int]
    ids: list[int]
    sampled: list[bool]
    prompt: Sequence[Message]
    messages: Sequence[Message]
    environment: Any = None


def trace_of_completion(
    row: Completion, trace_id: str, group_id: int, place: int, tools: Sequence[str], answer: Any
) -> Trace:
    """Return a row as a trace; its reward is not known, so it is no sibling's example.

    `tools` are the names of the tools, `answer` is the verified answer that no hint may hold.
    """
    sites, outcome = list(error_sites(row.messages, tools)), None
    if isinstance(row.environment, TaskEnvironment):
        outcome = row.environment._finished()
        sites = [*_own_sites(row.environment, row.messages)]
        answer = outcome.answer
    turns = list(_turns(row))
    return Trace(
        trace_id,
        group_id,
        place,
        row.environment._task.name if isinstance(row.environment, TaskEnvironment) else "trl",
        "train",
        place,
        turns,
        [*row.prompt, *row.messages],
        outcome.reward if outcome else 0.0,
        outcome.success if outcome else False,
        [site for site in sites if site.turn < len(turns)],
        answer=None if answer is None else str(answer),
        screened=bool(outcome and outcome.screened),
    )


def _turns(row: Completion) -> Iterator[Turn]:
    """Yield the runs of sampled ids, each with the ids before it."""
    context, at = list(row.prompt_ids), 0
    for sampled, run in groupby(row.sampled):
        ids = row.ids[at : at + len(list(run))]
        at += len(ids)
        if sampled:
            yield Turn(context, ids, [0.0] * len(ids), [0] * len(ids), "stop")
            context = []
        else:
            context = context + ids


def error_sites(messages: Sequence[Message], tools: Sequence[str]) -> Iterator[ErrorSite]:
    """Yield the failed calls of a conversation of TRL, by the turn of the assistant."""
    turn = -1
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
        elif message["role"] == "tool" and turn >= 0:
            content = message.get("content")
            if isinstance(content, str) and content.startswith(FAILED):
                text = content[len(FAILED) + 1 : -2][:LONGEST_ERROR]
                yield _site(turn, str(message.get("name", "")), text, tools)


def _site(turn: int, tool: str, text: str, tools: Sequence[str]) -> ErrorSite:
    if tool not in tools and text.endswith(MISSING):
        data = {"tool": tool, "tools": ", ".join(tools)}
        return ErrorSite(turn, "unknown_tool", "unknown_tool", data)
    return ErrorSite(turn, "tool_error", "tool_error", {"tool": tool, "text": text})


def said_last(messages: Sequence[Message]) -> str | None:
    """Return what a model says at the end without a call; None if it ends otherwise."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return str(last.get("content") or "")


def _own_sites(environment: TaskEnvironment, messages: Sequence[Message]) -> Iterator[ErrorSite]:
    """Yield the error sites of a task's environment by the turns of the assistant.

    The environment counts actions, of which a turn with several calls has several.
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    of_action = [
        turn
        for turn, message in enumerate(turns)
        for _ in range(max(1, len(message.get("tool_calls") or ())))
    ]
    for site in environment._sites:
        if site.turn < len(of_action):
            yield replace(site, turn=of_action[site.turn])
