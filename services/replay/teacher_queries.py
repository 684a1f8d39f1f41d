"""Queries teachers about states of finished groups and collects their decisions.

Choosing states and counting votes are pure rules elsewhere; `pair_stream` decides when a group is
queried and when its pairs are trained on.

Stored record of the teacher queries about one group: counts, novelty and filter candidates.

On resume these rows are read in group order, which restores the states that were queried and the
pairs that the filters have seen. Pairs that passed have rows of their own and are referenced by id;
pairs that a filter dropped are stored only here.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import together
from composer_mesh.rollouts.consensus import decide
from composer_mesh.rollouts.pairs import (
    PreferencePair,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    pair_from_json,
    pair_to_json,
)
from composer_mesh.rollouts.state_choice import Novelty, QueryRounds, Selection, select_states
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.ports import Teachers
from composer_mesh.services.steps.step_manifest import ReplayOutcome, figures_of, replay_outcome_of


@dataclass(frozen=True, slots=True)
class TeacherQueryRecord:
    """One group: the situations of its states, the counts, and its candidate pairs in order."""

    group_id: int
    situations: list[str]
    replay_outcome: ReplayOutcome
    candidates: list[PreferencePair]


def query_record_to_json(record: TeacherQueryRecord, kept: Sequence[PreferencePair]) -> bytes:
    """Serialize a record; `kept` are the candidates that have pair rows of their own."""
    named = {pair.pair_id for pair in kept}
    candidates: list[Any] = [
        pair.pair_id if pair.pair_id in named else json.loads(pair_to_json(pair))
        for pair in record.candidates
    ]
    body = {
        "situations": record.situations,
        "figures": figures_of(record.replay_outcome),
        "candidates": candidates,
    }
    return json.dumps(body, allow_nan=False).encode()


def query_record_from_json(
    group_id: int, body: bytes, pairs: Mapping[str, PreferencePair]
) -> TeacherQueryRecord:
    """Read what `query_record_to_json` wrote, resolving the stored pairs that it references."""
    found = json.loads(body)
    candidates = [
        pairs[one] if isinstance(one, str) else pair_from_json(json.dumps(one))
        for one in found["candidates"]
    ]
    return TeacherQueryRecord(
        group_id, found["situations"], replay_outcome_of(found["figures"]), candidates
    )


class Replay:
    """Queries teachers about `states_per_step` states for each step's worth of groups."""

    def __init__(
        self, teachers: Teachers, config: ReplayConfig, prompts_per_step: int, seed: int
    ) -> None:
        self._teachers, self._config, self._seed = teachers, config, seed
        self._prompts = prompts_per_step
        self._novelty = Novelty()

    def choose(self, group: Sequence[Trace]) -> Selection:
        """Select the group's states that are worth a query.

        Earlier selections make a state less novel, so the order of calls matters: callers must go
        by `group_id`.
        """
        group_id = group[0].group_id
        rng = random.Random(f"{self._seed}:replay:{group_id}")
        share = self._share(group_id)
        config = self._config
        selection = select_states(group, share, rng, config.gate, self._novelty, config.states)
        self._novelty.count_queries(selection.planned)
        return selection

    def restore(self, situations: Iterable[str]) -> None:
        """Register states that an earlier process of the run queried, for the novelty count."""
        self._novelty.restore(situations)

    async def ask_about(self, selection: Selection) -> ReplayOutcome:
        """Return the decisions about some states, queried in the rounds of their selection.

        Waits for the teachers, at most their timeout in each round.
        """
        replay_outcome = ReplayOutcome(skipped=selection.skipped, saved=selection.saved)
        rounds = QueryRounds(selection)
        while questions := rounds.next():
            for outcomes in await together(*(self._decide(states) for states in questions)):
                for state, one in outcomes:
                    if one.pairs:
                        rounds.differs(state)
                    replay_outcome += one
        return replay_outcome

    def _share(self, group_id: int) -> int:
        """Return the group's share of `states_per_step`; the shares of a step add up to it."""
        place, total = group_id % self._prompts, self._config.states_per_step
        return total * (place + 1) // self._prompts - total * place // self._prompts

    async def _decide(
        self, states: Sequence[StudentState]
    ) -> list[tuple[StudentState, ReplayOutcome]]:
        """Ask one question, and return the outcome of each state that it decides."""
        replies = await self._teachers.query(states[0].state, self._config.ask)
        threshold = self._config.agreement_threshold
        first, *others = states
        return [
            (first, decided(first, replies, threshold)),
            *((state, _decided_too(state, replies, threshold)) for state in others),
        ]


def replay_of(config: Config, teachers: Teachers) -> Replay:
    """Return the rules of a run, with its own seed and schedule."""
    return Replay(teachers, config.replay, config.schedule.prompts_per_step, config.run.seed)


def _decided_too(
    state: StudentState, replies: Sequence[TeacherReply], threshold: int
) -> ReplayOutcome:
    """Return the outcome of replies that were requested about another state of the context."""
    decision = decide(state, replies, threshold)
    pairs = [decision.pair] if decision.pair else []
    return ReplayOutcome(pairs, outcomes=Counter([decision.outcome.value]))


def decided(state: StudentState, replies: Sequence[TeacherReply], threshold: int) -> ReplayOutcome:
    """Return the outcome of the replies about one state."""
    answers = [reply for reply in replies if isinstance(reply, TeacherAnswer)]
    failures = [reply for reply in replies if not isinstance(reply, TeacherAnswer)]
    return replace(
        _decided_too(state, replies, threshold),
        states=1,
        answers=len(answers),
        cached=sum(answer.cached for answer in answers),
        usd=sum(reply.usd for reply in replies),
        failures=Counter(failure.kind.value for failure in failures),
        failed_by=Counter(map(_place, failures)),
        answered_by=Counter(answer.teacher for answer in answers),
        reasons={_place(failure): failure.text for failure in reversed(failures)},
    )


def _place(failure: TeacherFailure) -> str:
    return f"{failure.cause}/{failure.teacher}"
