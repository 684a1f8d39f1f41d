"""Demonstrations of an imperfect agent: conversations with mistakes, recoveries and hints.

They are generated as text, then encoded to ids exactly as a rollout would.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import TEMPLATES, HintTemplateError, HintTemplates, render_hint
from composer_mesh.rollouts.tool_calls import message_text, parse_action
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.mistakes import recover_or_give_up
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import Task

ANSWER_SHARE = 0.25
"""Ratio of the error rate in final answers to that in calls."""

Piece = tuple[str, str]
"""(kind, text), where kind is question, result, remark, hint or action."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Ids of one conversation; `learn` is True at the ids to imitate."""

    ids: list[int]
    learn: list[bool]


def conversations(task: Task, settings: WarmStartConfig, rng: random.Random) -> list[list[Piece]]:
    """Generate one conversation for each of the first training episodes."""
    episodes = range(settings.demonstrations)
    return [list(demonstrate(task, index, settings, rng)) for index in episodes]


def demonstrate(
    task: Task, index: int, settings: WarmStartConfig, rng: random.Random
) -> Iterator[Piece]:
    """Generate one conversation of an imperfect agent.

    The agent errs with `error_rate` and recovers after an error with `recovery_rate`. In
    `hinted_share` of the conversations a hint replaces what would have been the error.
    """
    with SyncSession(task, task.episode("train", index)) as session:
        yield from _demonstrate(task, index, session, settings, rng)


def _demonstrate(
    task: Task, index: int, session: SyncSession, settings: WarmStartConfig, rng: random.Random
) -> Iterator[Piece]:
    yield "question", session.messages[-1]["content"]
    templates = TEMPLATES.extended(task.hint_templates)
    hinted, failed, done = rng.random() < settings.hinted_share, False, False
    while not done:
        messages = session.messages
        text = right = task.continued(messages)
        if failed:
            text = recover_or_give_up(right, rng, settings.recovery_rate)
        elif rng.random() < settings.error_rate * (1 if parse_action(right) else ANSWER_SHARE):
            text = task.corrupted(messages, rng)
        if hinted and text != right:
            site = _error_of(task, index, session.messages, text)
            if site is not None and (hint := _hint(site, templates)):
                yield "hint", hint
                text = right
        yield "action", text
        result = session.step(text)
        failed, done = result.error is not None, result.done
        for message in result.messages:
            yield ("result" if message["role"] == "tool" else "remark"), message["content"]


def _hint(site: ErrorSite, templates: HintTemplates) -> str:
    """Return the hint for a site; "" where a fact is missing, or only the config has its template.

    Templates of the config alone are for the run's own hints.
    """
    try:
        return render_hint(site, templates=templates)
    except HintTemplateError:
        return ""


def _error_of(
    task: Task, index: int, messages: list[dict[str, Any]], text: str
) -> ErrorSite | None:
    """Return the error site of a wrong action, using a copy of the session.

    It is the site that the action would cause, or that of its unreported error.
    """
    with SyncSession(task, task.episode("train", index)) as copy:
        for message in messages:
            if message["role"] == "assistant":
                copy.step(message_text(message))
        found = copy.step(text).error
    unreported = None if found else task.unreported_error(messages, text)
    if unreported is None:
        return found
    return ErrorSite(0, unreported.kind, unreported.hint or unreported.kind, unreported.facts)


def encode(chat: ChatFormat, conversation: list[Piece]) -> Demonstration:
    """Encode a conversation as a rollout would: contexts grow by ids, actions are learned."""
    ids: list[int] = []
    action: list[int] = []
    learn: list[bool] = []
    roles = {"result": "tool", "remark": "user"}
    prompt = chat.generation_prompt
    for kind, text in conversation:
        if kind == "question":
            new = chat.first_prompt([{"role": "user", "content": text}])
        elif kind == "hint":
            del ids[-len(prompt) :], learn[-len(prompt) :]
            new = chat.hint(text) + prompt
        elif kind == "action":
            new = action = chat.action(text)
        else:
            new = chat.continuation([{"role": roles[kind], "content": text}], action)
        ids += new
        learn += [kind == "action"] * len(new)
    return Demonstration(ids, learn)
