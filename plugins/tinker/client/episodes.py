"""Rollouts of a task by a SamplingClient, and the hints and pairs that follow from them.

All requests of a turn are sent before the first answer is waited for.
Samplers also score given ids: a teacher's top-k log-probs, and log-probs of a reference.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from tinker import types

from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.plugins.tinker.client.sequences import Hinted, Pair, Rollout, TeacherTopK, Turn
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
            futures = [self.ask(one) for one in contexts]
            found = [future.result().sequences[0] for future in futures]
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
    queried = [[one.ask(_hinted_context(turn), ask) for one in teachers] for turn in turns]
    found = []
    for turn, futures in zip(turns, queried, strict=True):
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


def teacher_topk(sampler: Any, turns: Sequence[Hinted], k: int) -> list[Hinted]:
    """Return hinted turns with a teacher's `k` most probable ids at each token of their answers.

    `sampler` is a SamplingClient: of the trained weights for SDPO, or of any with their tokenizer.
    """
    queried = [_ask(sampler, one, k) for one in turns]
    return [
        replace(one, teacher=_rows(future.result(), one))
        for one, future in zip(turns, queried, strict=True)
    ]


def _ask(sampler: Any, one: Hinted, k: int) -> Any:
    return sampler.sample(
        prompt=types.ModelInput.from_ints(one.view.teacher_ids),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )


def _rows(found: Any, one: Hinted) -> TeacherTopK:
    """Return what is most probable at each id of the answer: what row r says of the id at r + 1."""
    rows = [found.topk_prompt_logprobs[row + 1] for row in one.view.teacher_rows]
    ids = np.array([[token for token, _ in row] for row in rows], np.int64)
    logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
    return TeacherTopK(ids, logprobs)


def with_reference(sampler: Any, pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs with the log-probs of their answers under a frozen SamplingClient."""
    queried = [
        [sampler.compute_logprobs(types.ModelInput.from_ints(ids)) for ids, _, _ in pair.sides]
        for pair in pairs
    ]
    found = []
    for pair, futures in zip(pairs, queried, strict=True):
        chosen, rejected = (future.result()[len(pair.context) :] for future in futures)
        found.append(replace(pair, chosen_logprobs=chosen, rejected_logprobs=rejected))
    return found
