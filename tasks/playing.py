"""Plays episodes of a task turn by turn, all together, with answers that its caller samples.

For loops that belong to others: a trainer of another framework, or a client of a training server.

A running episode with plain methods, for tests, demonstrations and the terminal.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self, TypeVar

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
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
        result: T = ended.value
        return result
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
