"""Plays episodes of a task turn by turn, all together, with answers that its caller samples.

For loops that belong to others: a trainer of another framework, or a client of a training server.

A running episode with plain methods, for tests, demonstrations and the terminal.

Demonstrations of an imperfect agent: conversations with mistakes, recoveries and hints.

They are generated as text, then encoded to ids exactly as a rollout would.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Self, TypeVar

from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.configs.sft import SftConfig
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import (
    HintTemplateError,
    HintTemplates,
    hint_templates,
    render_hint,
)
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import message_text, parse_action
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.tasks.mistakes import recover_or_give_up
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task

T = TypeVar("T")
_threads = threading.local()


class SyncSession:
    """One running episode. A task with coroutines can only be used outside event loops.

    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("<tool_call>…</tool_call>")
        print(session.outcome().reward)
    """

    def __init__(self, task: Task, episode: Episode) -> None:
        """Start the episode."""
        self._run = _run if _has_coroutines(task.of(episode.task)) else _finished
        whole = episode if episode.payload else task.episode(episode.split, episode.index)
        self._running = RunningEpisode(task, whole)
        self._run(self._running.begin())

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._running.messages

    def state(self, turn: int) -> list[Message]:
        """Return exactly what the agent saw when it acted at `turn` (0-based)."""
        return self._running.state(turn)

    def step(self, text: str) -> StepResult:
        """Apply an action of the agent."""
        return self._run(self._running.step(text))

    def outcome(self) -> Outcome:
        """Score the episode, ended or not."""
        return self._run(self._running.outcome())

    def close(self) -> None:
        """Release the session."""
        self._run(self._running.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_coroutines(task: Task) -> bool:
    """Whether any function of a task may have to wait."""
    session = task.session_class
    methods = [session.start, session.opening, session.reply, session.close]
    methods += [spec.function for spec in task.own_tools.values()]
    methods += [one.function for one in (*task.rewards, *task.turn_rewards)]
    methods += [task.success, task.verified_answer]
    return any(map(inspect.iscoroutinefunction, methods))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("a task without coroutines has waited for something")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of this thread, which all of its sessions share."""
    runner: asyncio.Runner | None = getattr(_threads, "runner", None)
    if runner is None:
        runner = _threads.runner = asyncio.Runner()
        atexit.register(runner.close)
    return runner.run(work)


Sampled = tuple[list[list[int]], list[list[float]] | None]
"""Answers of a batch, each up to and including its stop token, and their log-probs if known."""

Sample = Callable[[list[list[int]]], Sampled]
"""Answers a batch of contexts."""

PlayedTurn = tuple[list[int], list[int], list[float] | None]
"""Ids new in the context, ids sampled, and the log-probs of these if they are known."""


def play_episodes(
    task: Task,
    chat: ChatFormat,
    episodes: Sequence[Episode],
    sample: Sample,
    longest: int,
    first_group: int = 0,
) -> list[Trace]:
    """Play every episode to its end, together; equal neighbours are one group.

    A context of `longest` ids ends an episode without success. Groups count from `first_group` on.
    """
    games = [_Playing(task, chat, episode) for episode in episodes]
    for game in games:
        if game.length >= longest:
            raise ValueError(
                f"{game.episode.split}/{game.episode.index} begins with {game.length} tokens, "
                f"but max_context is {longest}: raise it, or leave the row out"
            )
    live = games
    while live := [game for game in live if game.length < longest]:
        answers, logprobs = sample([game.context for game in live])
        for place, (game, answer) in enumerate(zip(live, answers, strict=True)):
            cut = longest - game.length
            game.turn(answer[:cut], None if logprobs is None else logprobs[place][:cut])
        live = [game for game in live if not game.done]
    groups = accumulate((one != other for one, other in pairwise(episodes)), initial=0)
    return [
        game.trace(first_group + group, place)
        for place, (game, group) in enumerate(zip(games, groups, strict=True))
    ]


def played_trace(
    episode: Episode,
    outcome: Outcome,
    played: Sequence[PlayedTurn],
    sites: Sequence[ErrorSite],
    *,
    group_id: int = 0,
    place: int = 0,
) -> Trace:
    """Return the trace of an episode; unknown log-probs are 0, and all versions are 0."""
    turns = [
        Turn(context, answer, logprobs or [0.0] * len(answer), [0] * len(answer), "stop")
        for context, answer, logprobs in played
    ]
    return Trace(
        f"{episode.split}-{group_id:06d}-{place:03d}",
        group_id,
        place,
        episode.task,
        episode.split,
        episode.index,
        turns,
        outcome.messages,
        outcome.reward,
        outcome.success,
        list(sites),
        dict(outcome.rewards),
        outcome.answer,
        penalty=outcome.penalty,
        left_out=list(outcome.left_out),
        turn_rewards=outcome.turn_rewards,
        screened=outcome.screened,
    )


@dataclass
class _Playing:
    """One episode under way."""

    task: Task
    chat: ChatFormat
    episode: Episode
    done: bool = False
    turns: list[PlayedTurn] = field(default_factory=list)
    sites: list[ErrorSite] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = SyncSession(self.task, self.episode)
        self._fresh = self.chat.first_prompt(self._session.messages)
        self.context = list(self._fresh)

    @property
    def length(self) -> int:
        return len(self.context)

    def turn(self, answer: list[int], logprobs: list[float] | None) -> None:
        """Apply what was sampled."""
        self.turns.append((self._fresh, answer, logprobs))
        step = self._session.step(self.chat.action_text(answer))
        if step.error is not None:
            self.sites.append(step.error)
        self.done = step.done
        self._fresh = [] if step.done else self.chat.continuation(step.messages, answer)
        self.context += answer + self._fresh

    def trace(self, group_id: int, place: int) -> Trace:
        """Score the episode and return it, without log-probs where none are known."""
        outcome = self._session.outcome()
        self._session.close()
        return played_trace(
            self.episode, outcome, self.turns, self.sites, group_id=group_id, place=place
        )


ANSWER_SHARE = 0.25
"""Ratio of the error rate in final answers to that in calls."""

ROLES = {"system": "system", "question": "user", "remark": "user", "result": "tool"}
"""The role of the message that a kind of piece is."""
KINDS = {"system": "system", "user": "question", "tool": "result"}
"""The kind of piece that a message of a role is."""

Piece = tuple[str, str]
"""(kind, text), where kind is one of `ROLES`, hint, action, or given: an action not imitated."""

Mistakes = WarmStartConfig | SftConfig
"""How many episodes are demonstrated, and how often the agent errs."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Ids of one conversation; `learn` is True at the ids to imitate."""

    ids: list[int]
    learn: list[bool]


def conversations(task: Task, settings: Mistakes, rng: random.Random) -> Iterator[list[Piece]]:
    """Generate one conversation for each of the first training episodes."""
    for index in range(settings.demonstrations):
        yield list(demonstrate(task, index, settings, rng))


def demonstrate(task: Task, index: int, settings: Mistakes, rng: random.Random) -> Iterator[Piece]:
    """Generate one conversation of an imperfect agent: of the task's expert, else its gold actions.

    The agent errs with `error_rate` and recovers after an error with `recovery_rate`. In
    `hinted_share` of the conversations a hint replaces what would have been the error.
    """
    episode = task.episode("train", index)
    gold = None if task.has_expert else iter(task.of(episode.task).gold(episode.payload))
    with SyncSession(task, episode) as session:
        yield from _demonstrate(task, index, session, settings, rng, gold)


def _demonstrate(
    task: Task,
    index: int,
    session: SyncSession,
    settings: Mistakes,
    rng: random.Random,
    gold: Iterator[str] | None,
) -> Iterator[Piece]:
    yield from ((KINDS[message["role"]], message["content"]) for message in session.messages)
    templates = hint_templates(task.hint_templates)
    hinted, failed, done = rng.random() < settings.hinted_share, False, False
    while not done:
        messages = session.messages
        found = task.continued(messages) if gold is None else next(gold, None)
        if found is None:
            return
        text = right = found
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


def encode(chat: ChatFormat, conversation: Iterable[Piece]) -> Demonstration:
    """Encode a conversation as a rollout would: contexts grow by ids, actions are learned."""
    ids: list[int] = []
    learn: list[bool] = []
    action: list[int] | None = None
    for kind, pieces in groupby(conversation, lambda piece: "" if piece[0] in ROLES else piece[0]):
        if not kind:
            said = [{"role": ROLES[role], "content": text} for role, text in pieces]
            new = chat.first_prompt(said) if action is None else chat.continuation(said, action)
            ids += new
            learn += [False] * len(new)
            continue
        for _, text in pieces:
            if kind == "hint":
                prompt = chat.generation_prompt
                del ids[-len(prompt) :], learn[-len(prompt) :]
                new = chat.hint(text) + prompt
            else:
                new = action = chat.action(text)
            ids += new
            learn += [kind == "action"] * len(new)
    return Demonstration(ids, learn)
