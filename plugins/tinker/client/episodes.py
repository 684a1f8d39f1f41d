"""Rollouts of a task by a SamplingClient, and the hints and pairs that follow from them.

All requests of a turn are sent before the first answer is waited for.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tinker import types

from composer_mesh.channels.sdpo.samples import hinted_sites
from composer_mesh.plugins.tinker.client.sequences import Hinted, Pair, Rollout, Turn
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.playing import Sampled, play_episodes
from composer_mesh.tasks.task import Task

ERROR = 1e-4
"""Added to the standard deviation of a group's rewards."""


@dataclass(frozen=True)
class Sampler:
    """A SamplingClient with the chat format of its model, and bounds of what it writes."""

    client: Any
    chat: ChatFormat
    max_new_tokens: int
    max_context: int
    temperature: float = 1.0

    def ask(self, context: Sequence[int], count: int = 1) -> Any:
        """Return the future of some answers to a context."""
        remaining = self.max_context - len(context)
        settings = types.SamplingParams(
            max_tokens=min(self.max_new_tokens, remaining),
            temperature=self.temperature,
            stop=self.chat.stop_ids,
        )
        prompt = types.ModelInput.from_ints(list(context))
        return self.client.sample(prompt=prompt, num_samples=count, sampling_params=settings)

    def play(self, task: Task, episodes: Sequence[Episode]) -> list[Trace]:
        """Play episodes to their end, together; equal neighbours are one group."""

        def sample(contexts: list[list[int]]) -> Sampled:
            asked = [self.ask(one) for one in contexts]
            found = [future.result().sequences[0] for future in asked]
            return [list(one.tokens) for one in found], [list(one.logprobs) for one in found]

        return play_episodes(task, self.chat, episodes, sample, self.max_context)


def rollouts_of(traces: Sequence[Trace]) -> list[Rollout]:
    """Return traces with GRPO's advantages: rewards in standard deviations from their group's."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        rewards[trace.group_id].append(trace.reward)
    found = []
    for trace in traces:
        own = rewards[trace.group_id]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        advantage = (trace.reward - statistics.mean(own)) / (spread + ERROR)
        turns = [Turn(one.context_ids, one.action_ids, one.logprobs) for one in trace.turns]
        found.append(Rollout(turns, advantage))
    return found


def hinted_turns(
    traces: Sequence[Trace],
    rollouts: Sequence[Rollout],
    chat: ChatFormat,
    limit: int,
    max_context: int,
) -> list[Hinted]:
    """Return the turns of error sites with their hints, as a run of this project chooses them.

    `rollouts` are those of the traces, in their order. Hints that hold the answer are left out.
    """
    named = {trace.trace_id: one for trace, one in zip(traces, rollouts, strict=True)}
    # Context for one more token, which a request about a prompt samples.
    sites = hinted_sites(traces, chat, attrgetter("answer"), limit, max_context - 1)
    return [Hinted(named[view.trace_id], view) for view in sites.views]


def pairs_by_vote(
    teachers: Sequence[Sampler],
    turns: Sequence[Hinted],
    ask: int = 3,
    threshold: int = 2,
) -> list[Pair]:
    """Return pairs of the action that most answers to a hinted turn agree on, and the student's.

    Each teacher answers `ask` times. An action needs `threshold` votes and more than half of all;
    one that the student took itself makes no pair, and malformed ones have no vote.
    """
    asked = [[one.ask(_hinted_context(turn), ask) for one in teachers] for turn in turns]
    found = []
    for turn, futures in zip(turns, asked, strict=True):
        answers = [list(one.tokens) for future in futures for one in future.result().sequences]
        pair = _voted(turn, answers, teachers[0].chat, threshold)
        found += [] if pair is None else [pair]
    return found


def _hinted_context(turn: Hinted) -> list[int]:
    return turn.view.teacher_ids[: turn.view.teacher_rows[0] + 1]


def _voted(
    turn: Hinted, answers: Sequence[list[int]], chat: ChatFormat, threshold: int
) -> Pair | None:
    keys = [canonical_action(chat.action_text(ids)) for ids in answers]
    votes = Counter(one for one in keys if one.kind != "malformed")
    student = turn.view.targets
    if not votes:
        return None
    winner, count = votes.most_common(1)[0]
    own = canonical_action(chat.action_text(student))
    if count < threshold or 2 * count <= sum(votes.values()) or winner == own:
        return None
    context = turn.rollout.ids[: turn.view.student_rows[0] + 1]
    return Pair(context, answers[keys.index(winner)], student)
