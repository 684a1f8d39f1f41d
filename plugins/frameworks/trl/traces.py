"""Traces of TRL's own rollouts: of its tools and environments, from the ids that it trains.

TRL keeps a tool's failure as the text of an error. Here it becomes an error site at the turn whose
call failed, so that tools need not change to be taught at their errors. Of a generation batch there
are the hinted turns that SDPO trains too. Imports no TRL: rows, outputs and environments are those
that its trainer holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from composer_mesh.channels.sdpo import HintedSites, hinted_sites
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.environments import TaskEnvironment
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import HintTemplates
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


Rows = Sequence[Mapping[str, Any]]
Traces = list[Trace | None]


def batch_traces(
    rows: Rows,
    found: Mapping[str, Any],
    completions: Sequence[Any],
    environments: Sequence[Any] | None,
    tools: Sequence[str],
    name: str,
) -> Traces:
    """Return the trace of each row; None where TRL leaves a row out of its loss.

    `found` is what TRL made of the rows, `completions` what the model said, `tools` the names of
    the tools. `name` begins the ids of traces that are made here: `TaskRollouts` brings its own.
    """
    if all(isinstance(row.get("trace"), Trace) for row in rows):
        kept = found["completion_mask"].bool().any(-1).tolist()
        return [row["trace"] if one else None for row, one in zip(rows, kept, strict=True)]
    group, traces = 0, Traces()
    for place, row in enumerate(rows):
        group += place > 0 and row.get("prompt") != rows[place - 1].get("prompt")
        environment = environments[place] if environments else None
        one = _completion(place, row, found, completions[place], environment)
        trace_id, answer = f"{name}-{place:04d}", row.get("answer")
        traces.append(
            trace_of_completion(one, trace_id, group, place, tools, answer) if one.ids else None
        )
    return traces


def _completion(
    place: int, row: Mapping[str, Any], found: Mapping[str, Any], said: Any, environment: Any
) -> Completion:
    shown = found["completion_mask"][place].bool()
    sampled = found["tool_mask"][place][shown] if "tool_mask" in found else shown[shown]
    prompt = row.get("prompt")
    return Completion(
        found["prompt_ids"][place][found["prompt_mask"][place].bool()].tolist(),
        found["completion_ids"][place][shown].tolist(),
        sampled.bool().tolist(),
        prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}],
        said if isinstance(said, list) else [{"role": "assistant", "content": str(said)}],
        environment,
    )


def batch_sites(
    traces: Traces,
    sdpo: SdpoConfig,
    chat: ChatFormat,
    templates: HintTemplates,
    limit: int,
    longest: int,
) -> HintedSites:
    """Return at most `limit` hinted turns; a context with a hint has at most `longest` ids."""
    return hinted_sites(
        [one for one in traces if one is not None],
        chat,
        lambda trace: trace.answer,
        limit,
        longest,
        sdpo.hints,
        templates=templates,
    )


def views_by_row(traces: Traces, views: Sequence[HintedView]) -> list[list[HintedView]]:
    """Return the hinted turns of each row, in order."""
    by_trace: dict[str, list[HintedView]] = {}
    for view in views:
        by_trace.setdefault(view.trace_id, []).append(view)
    return [[] if trace is None else by_trace.get(trace.trace_id, []) for trace in traces]
