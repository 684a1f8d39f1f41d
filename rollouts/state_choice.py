"""Selection of the student's turns to show to teachers, when each answer costs money.

By value, teachers are queried about the states with the highest value. By first divergence, they
are queried about the contexts of a group in order of turn, and about no rollout beyond the turn at
which they first differ from it. Where fewer may be queried than a rollout has turns, the value says
which.
States below the gate's minimum are skipped.

Estimated value of a teacher's answer to a state: the weighted mean of four signals in [0, 1].

- error: 1 if the turn's own action failed, 0.5 if only its episode did, else 0.
- entropy: 1 - exp(-s / entropy_scale), where s is the mean surprisal in nats of the turn's sampled
  tokens: a one-sample estimate of the entropy.
- disagreement: the mean of two shares. The first is the share of the group's other samples in the
  same context (the same token ids) that acted differently. The second is the spread of the group's
  rewards, 4 times their variance: 1 if half have reward 0 and half 1, and at most 1.
- novelty: 1 / (1 + number of earlier queries about the same situation).

`state_choice` selects states by these values.
"""

import hashlib
import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pvariance

from composer_mesh.configs.replay import GateConfig, StateOrder
from composer_mesh.rollouts.consensus import ActionKey, canonical_action
from composer_mesh.rollouts.pairs import FrozenState, StudentState
from composer_mesh.rollouts.tool_calls import ToolCall, message_text, parse_action
from composer_mesh.rollouts.traces import Trace

LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class StateSignals:
    """Signals of one state; the names are those of the weights in `GateConfig`."""

    error: float
    entropy: float
    disagreement: float
    novelty: float


def state_value(signs: StateSignals, gate: GateConfig) -> float:
    """Return the mean of the signals by the gate's weights, from 0 to 1."""
    weighted = (
        (gate.error, signs.error),
        (gate.entropy, signs.entropy),
        (gate.disagreement, signs.disagreement),
        (gate.novelty, signs.novelty),
    )
    largest = max(weight for weight, _ in weighted)
    shares = [weight / largest for weight, _ in weighted]  # their sum cannot overflow
    total = sum(share * sign for share, (_, sign) in zip(shares, weighted, strict=True))
    return min(1.0, total / sum(shares))


def error_sign(trace: Trace, turn: int) -> float:
    if error_kind(trace, turn):
        return 1.0
    return 0.0 if trace.success else 0.5


def error_kind(trace: Trace, turn: int) -> str:
    """Return the kind of the error at a turn, or "" if there is none."""
    return next((site.error_kind for site in trace.error_sites if site.turn == turn), "")


def entropy_sign(logprobs: Sequence[float], scale: float) -> float:
    """Return the student's uncertainty from the log-probs (nats) of its sampled tokens."""
    if not logprobs:
        return 0.0
    return -math.expm1(-max(0.0, -fmean(logprobs)) / scale)


def action_disagreement(own: ActionKey, same_context: Mapping[ActionKey, int]) -> float:
    """Return the share of other samples in a context that acted differently.

    `same_context` counts all samples.
    """
    others = sum(same_context.values()) - 1
    if others < 1:
        return 0.0
    return (others + 1 - same_context[own]) / others


def reward_spread(rewards: Sequence[float]) -> float:
    """Return 4 times the variance, at most 1: the uncertainty of the group's success."""
    return min(1.0, 4 * pvariance(rewards)) if rewards else 0.0


def situation(trace: Trace, turn: int, action_text: str) -> str:
    """Return a coarse name of a state: task, preceding error, the student's action, its error.

    States of one name are similar enough that an answer about one is informative about the others.
    """
    action = parse_action(action_text)
    did = "answers" if action is None else "malformed"
    if isinstance(action, ToolCall):
        did = f"calls {action.name[:LONGEST_NAME]}"
    before = error_kind(trace, turn - 1) or ("opening" if turn == 0 else "going on")
    return f"{trace.task}: {before}: {did}: {error_kind(trace, turn) or 'no error'}"


class Novelty:
    """Number of queries for each situation."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def count_queries(self, states: Iterable[StudentState]) -> None:
        """Count states that are sent to teachers."""
        self.restore(state.situation for state in states)

    def restore(self, situations: Iterable[str]) -> None:
        """Count states that an earlier process of the run has sent to teachers."""
        self._counts.update(situations)

    def sign(self, name: str) -> float:
        """Return the novelty signal of a situation."""
        return 1 / (1 + self._counts[name])


REACH = 4
"""Contexts that are selected by first divergence, as a multiple of those that may be queried."""
Mark = tuple[bytes, ActionKey]
"""What was done in which context: equal for siblings until they part."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected states in the order in which they are queried, and the `values` of each.

    Of `distinct` states in total, `skipped` were below the gate's `min_value`; the others that are
    missing exceeded the limit. `saved` is how many more would be selected without `min_value`.
    By first divergence they are in order of turn, more than the `limit` of contexts that are
    queried. `paths` has what the rollout of each state did until then, the state's own action last.
    """

    states: list[StudentState]
    values: list[float]
    skipped: int
    distinct: int
    saved: int
    limit: int | None = None
    paths: list[list[Mark]] = field(default_factory=list)

    @property
    def questions(self) -> list[list[StudentState]]:
        """The states by the question that decides them: by first divergence those of a context."""
        if self.limit is None:
            return [[state] for state in self.states]
        found: defaultdict[bytes, list[StudentState]] = defaultdict(list)
        for state, path in zip(self.states, self.paths, strict=True):
            found[path[-1][0]].append(state)
        return list(found.values())

    @property
    def most(self) -> int:
        """Number of questions that are sent at most."""
        count = len(self.questions)
        return count if self.limit is None else min(count, self.limit)

    @property
    def planned(self) -> list[StudentState]:
        """A state of each question that is sent where no teacher differs from a rollout."""
        rounds = QueryRounds(self)
        return [states[0] for questions in iter(rounds.next, []) for states in questions]

    def cut(self, limit: int) -> "Selection":
        """Return the selection with at most so many questions."""
        if self.limit is not None:
            return replace(self, limit=min(self.limit, limit))
        return replace(self, states=self.states[:limit], values=self.values[:limit])


class QueryRounds:
    """The rounds of a selection's questions: all at once, or turn by turn until rollouts differ."""

    def __init__(self, selection: Selection) -> None:
        self._waiting, self._left = selection.questions, selection.most
        self._in_turns = selection.limit is not None
        self._few = self._left < len({states[0].turn for states in self._waiting})
        names = [state.state.state_id for state in selection.states]
        self._values = dict(zip(names, selection.values, strict=True))
        paths = zip(names, selection.paths, strict=True) if self._in_turns else ()
        self._paths: dict[str, Sequence[Mark]] = dict(paths)
        self._differing: set[Mark] = set()

    def next(self) -> list[list[StudentState]]:
        """Return the next questions, each with the states that it decides; none at the end.

        They are those of the first turn that are open. Where fewer may be queried than there are
        turns, only as many of the highest value are considered.
        """
        open_ones = [states for states in self._waiting if self._is_open(states)]
        best = sorted(open_ones, key=self._value, reverse=True)
        considered = best[: self._left] if self._few else best
        first = min((states[0].turn for states in considered), default=0)
        if self._in_turns:
            considered = [states for states in considered if states[0].turn == first]
        queried = considered[: self._left]
        taken = set(map(id, queried))
        self._waiting = [states for states in open_ones if id(states) not in taken]
        self._left -= len(queried)
        return queried

    def differs(self, state: StudentState) -> None:
        """Leave out what rollouts did after this action: their teachers differ from it."""
        if path := self._paths.get(state.state.state_id):
            self._differing.add(path[-1])

    def _is_open(self, states: Sequence[StudentState]) -> bool:
        return self._differing.isdisjoint(self._paths.get(states[0].state.state_id, ()))

    def _value(self, states: Sequence[StudentState]) -> float:
        return max(self._values[state.state.state_id] for state in states)


NOTHING = Selection([], [], skipped=0, distinct=0, saved=0)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One turn of one trace. `context` is a digest of all ids that the student had read."""

    trace: Trace
    turn: int
    context: bytes
    action: ActionKey
    situation: str


def select_states(
    traces: Iterable[Trace],
    limit: int,
    rng: random.Random,
    gate: GateConfig | None = None,
    novelty: Novelty | None = None,
    order: StateOrder = "value",
) -> Selection:
    """Select states, deterministically for equal arguments: at most `limit` by descending value.

    By first divergence the states of up to `REACH` times as many contexts are selected, of which
    at most `limit` are queried.

    Samples of a group share a prompt: of states with the same context and action only the best is
    kept. States with the same context but different actions are all kept and have the same seed, so
    that one query answers all of them. `novelty` is not updated: the caller does that for the
    states it queries. No state of a screened rollout is shown to a teacher.
    """
    gate, novelty = gate or GateConfig(), novelty or Novelty()
    salt = rng.getrandbits(64)
    candidates = [candidate for trace in _in_order(traces) for candidate in _candidates(trace)]
    ranked = list(zip(candidates, _values(candidates, gate, novelty), strict=True))
    rng.shuffle(ranked)
    ranked.sort(key=lambda item: -item[1])
    distinct = list(_distinct(ranked))
    worthy = [item for item in distinct if item[1] >= gate.min_value]
    in_turns = order == "first"
    chosen = _in_reach(worthy, limit) if in_turns else worthy[:limit]
    return Selection(
        [student_state(candidate.trace, candidate.turn, salt) for candidate, _ in chosen],
        [value for _, value in chosen],
        skipped=len(distinct) - len(worthy),
        distinct=len(distinct),
        saved=min(limit, len(distinct)) - min(limit, len(worthy)),
        limit=limit if in_turns else None,
        paths=_paths([candidate for candidate, _ in chosen], candidates) if in_turns else [],
    )


def student_state(trace: Trace, turn: int, salt: int = 0) -> StudentState:
    """Return the state of one turn; its seed depends on `salt` and on the context ids."""
    context_ids = trace.prompt_ids(turn)
    digest = hashlib.sha256(f"{salt}/".encode() + _bytes(context_ids)).digest()
    at = trace.action_places()[turn]
    text = message_text(trace.messages[at])
    seed = int.from_bytes(digest[:4]) >> 1
    return StudentState(
        state=FrozenState(f"{trace.trace_id}/{turn}", trace.messages[:at], seed, trace.task),
        trace_id=trace.trace_id,
        turn=turn,
        action_text=text,
        context_ids=context_ids,
        action_ids=trace.turns[turn].action_ids,
        oldest_version=min(trace.turns[turn].versions),
        situation=situation(trace, turn, text),
    )


def _in_order(traces: Iterable[Trace]) -> list[Trace]:
    every = [one for trace in traces for one in trace.trajectories()]
    return sorted((one for one in every if not one.screened), key=lambda one: one.trace_id)


def _candidates(trace: Trace) -> Iterator[_Candidate]:
    """Yield every turn in which the student sampled at least one token and no more than one call.

    Teachers answer with one call, which is no better or worse than several.
    """
    for turn, (at, context) in enumerate(zip(trace.action_places(), _contexts(trace), strict=True)):
        several = len(trace.messages[at].get("tool_calls") or []) > 1
        if trace.turns[turn].action_ids and not several:
            text = message_text(trace.messages[at])
            kind = situation(trace, turn, text)
            yield _Candidate(trace, turn, context, canonical_action(text), kind)


def _contexts(trace: Trace) -> Iterator[bytes]:
    """Yield for each turn a digest of the ids before its action."""
    read = hashlib.sha256()
    for turn in trace.turns:
        read.update(_bytes(turn.context_ids))
        yield read.digest()
        read.update(_bytes(turn.action_ids))


def _in_reach(
    worthy: Sequence[tuple[_Candidate, float]], limit: int
) -> list[tuple[_Candidate, float]]:
    """Return the candidates, in order of turn, of the contexts of which `limit` are queried."""
    in_turns = sorted(worthy, key=lambda item: item[0].turn)
    turns = len({candidate.turn for candidate, _ in worthy})
    first = worthy if limit < turns else in_turns
    kept = set(list(dict.fromkeys(one.context for one, _ in first))[: REACH * limit])
    return [item for item in in_turns if item[0].context in kept]


def _paths(chosen: Sequence[_Candidate], all_turns: Sequence[_Candidate]) -> list[list[Mark]]:
    """Return what the rollout of each chosen candidate did until then."""
    done: defaultdict[str, list[tuple[int, Mark]]] = defaultdict(list)
    for one in all_turns:
        done[one.trace.trace_id].append((one.turn, (one.context, one.action)))
    return [[mark for turn, mark in done[one.trace.trace_id] if turn <= one.turn] for one in chosen]


def _bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def _values(candidates: Sequence[_Candidate], gate: GateConfig, novelty: Novelty) -> list[float]:
    acted: defaultdict[tuple[int, bytes], Counter[ActionKey]] = defaultdict(Counter)
    rewards: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for candidate in candidates:
        acted[candidate.trace.group_id, candidate.context][candidate.action] += 1
        rewards[candidate.trace.group_id][candidate.trace.trace_id] = candidate.trace.reward
    spread = {group: reward_spread(list(of.values())) for group, of in rewards.items()}
    values = []
    for candidate in candidates:
        trace, turn = candidate.trace, candidate.turn
        otherwise = action_disagreement(candidate.action, acted[trace.group_id, candidate.context])
        signs = StateSignals(
            error=error_sign(trace, turn),
            entropy=entropy_sign(trace.turns[turn].logprobs, gate.entropy_scale),
            disagreement=(otherwise + spread[trace.group_id]) / 2,
            novelty=novelty.sign(candidate.situation),
        )
        values.append(state_value(signs, gate))
    return values


def _distinct(ranked: Iterable[tuple[_Candidate, float]]) -> Iterator[tuple[_Candidate, float]]:
    seen: set[tuple[bytes, ActionKey]] = set()
    for candidate, value in ranked:
        mark = (candidate.context, candidate.action)
        if mark not in seen:
            seen.add(mark)
            yield candidate, value
