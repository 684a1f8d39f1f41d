"""Which of the student's turns to show to teachers, when there is room for a few.

Error turns come first, then turns of failed episodes, then the others. Nothing here asks a
teacher or knows what an answer costs.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from itertools import islice

from composer_mesh.rollouts.pairs import FrozenState, StudentState, canonical_action
from composer_mesh.rollouts.tool_calls import message_text
from composer_mesh.rollouts.traces import Trace


def select_states(traces: Iterable[Trace], limit: int, rng: random.Random) -> list[StudentState]:
    """At most `limit` states, the most telling first; the same traces and rng give the same.

    Samples of a group start from one prompt: a state that differs from an earlier one in nothing
    but its trace is chosen once.
    """
    salt = rng.getrandbits(64)
    ordered = sorted(traces, key=lambda trace: trace.trace_id)
    turns = [(t, turn) for t in ordered for turn, said in enumerate(t.turns) if said.action_ids]
    rng.shuffle(turns)
    turns.sort(key=lambda item: _urgency(*item))
    states = _distinct(student_state(*item, salt) for item in turns)
    return list(islice(states, limit))


def student_state(trace: Trace, turn: int, salt: int = 0) -> StudentState:
    """The state of one turn; its seed depends on `salt` and the state's id alone."""
    state_id = f"{trace.trace_id}/{turn}"
    digest = hashlib.sha256(f"{salt}/{state_id}".encode()).digest()
    at = _action_index(trace, turn)
    return StudentState(
        state=FrozenState(state_id, trace.messages[:at], int.from_bytes(digest[:4]) >> 1),
        trace_id=trace.trace_id,
        turn=turn,
        action_text=message_text(trace.messages[at]),
        context_ids=trace.prompt_ids(turn),
        action_ids=trace.turns[turn].action_ids,
        oldest_version=min(trace.turns[turn].versions),
    )


def _action_index(trace: Trace, turn: int) -> int:
    """Where the action of a turn is in the messages; a prompt may hold assistant messages too."""
    spoken = [i for i, message in enumerate(trace.messages) if message["role"] == "assistant"]
    if len(spoken) < len(trace.turns):
        raise ValueError(
            f"trace {trace.trace_id} has {len(trace.turns)} turns and {len(spoken)} assistant "
            "messages: store the conversation with each action in it"
        )
    return spoken[len(spoken) - len(trace.turns) + turn]


def _urgency(trace: Trace, turn: int) -> int:
    if any(site.turn == turn for site in trace.error_sites):
        return 0
    return 2 if trace.success else 1


def _distinct(states: Iterable[StudentState]) -> Iterator[StudentState]:
    seen: set[tuple[tuple[int, ...], str, str]] = set()
    for state in states:
        key = canonical_action(state.action_text)
        mark = (tuple(state.context_ids), key.kind, key.value)
        if mark not in seen:
            seen.add(mark)
            yield state
