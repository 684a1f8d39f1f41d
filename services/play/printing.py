"""Prints a played episode. What a task or a model wrote is printed as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from composer_mesh.rollouts.hints import HintTemplates
from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.rollouts.tool_calls import message_text
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.tasks.task import Task

LONGEST_LINE = 2_000
MOST_LINES = 200


def title_lines(task: Task, split: str, index: int) -> Iterator[str]:
    """Yield what is played, and the tools of the task."""
    turns = task.settings.max_turns
    yield f"task {plain_text(task.name)}, {split} episode {index}, at most {turns} turns"
    for tool in task.tools:
        function = tool["function"]
        arguments = ", ".join(function["parameters"]["properties"])
        described = " ".join(str(function["description"]).split())
        yield plain_text(f"  {function['name']}({arguments})  {described}", LONGEST_LINE)


def message_lines(messages: Sequence[Message]) -> Iterator[str]:
    """Yield messages with their roles."""
    for message in messages:
        yield from _block(f"[{plain_text(str(message['role']), 20)}] ", _text(message))


def error_lines(site: ErrorSite, templates: HintTemplates) -> Iterator[str]:
    """Yield an error site with its facts and the hint that it would get."""
    facts = "; ".join(f"{name}: {value}" for name, value in site.data.items())
    yield plain_text(
        f"  error {site.error_kind} ({facts})" if facts else f"  error {site.error_kind}"
    )
    yield plain_text(f"  hint ({site.hint_template_key}): {templates.fill(site)}", LONGEST_LINE)


def outcome_lines(task: Task, outcome: Outcome, turns: int, done: bool) -> Iterator[str]:
    """Yield how an episode ended, and each of its rewards."""
    ended = "ended" if done else "was left unfinished"
    success = "success" if outcome.success else "no success"
    yield f"the episode {ended} after {turns} turns: reward {outcome.reward:g}, {success}"
    for one in task.rewards:
        found = outcome.rewards.get(one.name)
        value = "left out" if found is None else f"{found:g}"
        yield plain_text(f"  {one.name}: {value}, weight {one.weight:g}")
    if task.settings.tool_error_penalty:
        yield f"  each error costs {task.settings.tool_error_penalty:g}"


def _text(message: Message) -> str:
    if message["role"] == "assistant":
        return message_text(message)
    content = message.get("content")
    return content if isinstance(content, str) else str(content or "")


def _block(head: str, text: str) -> Iterator[str]:
    lines = text.splitlines() or [""]
    for place, line in enumerate(lines[:MOST_LINES]):
        yield (" " * len(head) if place else head) + plain_text(line, LONGEST_LINE)
    if len(lines) > MOST_LINES:
        yield f"{' ' * len(head)}… ({len(lines):,} lines)"
