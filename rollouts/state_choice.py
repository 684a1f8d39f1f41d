"""Selection of the student's turns to show to teachers, when each answer costs money.

The states with the highest value come first; those below the gate's minimum are skipped.
"""

import hashlib
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from composer_mesh.configs.gate import GateConfig
from composer_mesh.rollouts.actions import ActionKey, canonical_action
from composer_mesh.rollouts.pairs import FrozenState, StudentState
from composer_mesh.rollouts.state_value import (
    Novelty,
    StateSignals,
    action_disagreement,
    entropy_sign,
    error_sign,
    reward_spread,
    situation,
    state_value,
)
from composer_mesh.rollouts.tool_calls import message_text
from composer_mesh.rollouts.traces import Trace


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected states, best first, and the `values` of each.

    Of `distinct` states in total, `skipped` were below the gate's `min_value`; the others that are
    missing exceeded the limit. `saved` is how many more would be selected without `min_value`.
    """

    states: list[StudentState]
    values: list[float]
    skipped: int
    distinct: int
    saved: int


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
) -> Selection:
    """Select at most `limit` states by descending value, deterministically for equal arguments.

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
    chosen = worthy[:limit]
    return Selection(
        [student_state(candidate.trace, candidate.turn, salt) for candidate, _ in chosen],
        [value for _, value in chosen],
        skipped=len(distinct) - len(worthy),
        distinct=len(distinct),
        saved=len(distinct[:limit]) - len(chosen),
    )


def student_state(trace: Trace, turn: int, salt: int = 0) -> StudentState:
    """Return the state of one turn; its seed depends on `salt` and on the context ids."""
    context_ids = trace.prompt_ids(turn)
    digest = hashlib.sha256(f"{salt}/".encode() + _bytes(context_ids)).digest()
    at = _actions_at(trace)[turn]
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


def _actions_at(trace: Trace) -> list[int]:
    """Return the message indices of the turns' actions; a prompt may hold assistant messages."""
    spoken = [i for i, message in enumerate(trace.messages) if message["role"] == "assistant"]
    if len(spoken) < len(trace.turns):
        raise ValueError(
            f"trace {trace.trace_id} has {len(trace.turns)} turns and {len(spoken)} assistant "
            "messages: store the conversation with each action in it"
        )
    return spoken[len(spoken) - len(trace.turns) :]


def _in_order(traces: Iterable[Trace]) -> list[Trace]:
    every = [one for trace in traces for one in trace.trajectories()]
    return sorted((one for one in every if not one.screened), key=lambda one: one.trace_id)


def _candidates(trace: Trace) -> Iterator[_Candidate]:
    """Yield every turn in which the student sampled at least one token and no more than one call.

    Teachers answer with one call, which is no better or worse than several.
    """
    for turn, (at, context) in enumerate(zip(_actions_at(trace), _contexts(trace), strict=True)):
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
