"""Pickles of the messages of rollout workers give back what was sent, in few bytes."""

from __future__ import annotations

import math
import pickle
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.generation import GenerationRequest
from composer_mesh.rollouts.traces import Turn, pickled_by_position, runs_of, values_of

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
NUMBERS = st.floats(width=64)


@given(IDS, st.lists(st.tuples(st.integers(0, 2**31 - 1), NUMBERS, st.integers(0, 3)), max_size=20))
def test_a_turn_comes_back_as_it_was_sent(
    context: list[int], tokens: list[tuple[int, float, int]]
) -> None:
    actions, logprobs, versions = ([one[at] for one in tokens] for at in range(3))
    turn = Turn(context, actions, logprobs, versions, "length", trained=False)  # type: ignore[arg-type]
    back = pickle.loads(pickle.dumps(turn))
    assert (back.context_ids, back.action_ids, back.versions) == (context, actions, versions)
    assert list(map(repr, back.logprobs)) == list(map(repr, logprobs))
    assert (back.stop_reason, back.trained) == ("length", False)
    assert {type(one) for one in back.context_ids + back.action_ids + back.versions} <= {int}


def test_a_turn_takes_four_bytes_an_id_and_twelve_an_action_token() -> None:
    turn = Turn(list(range(1000)), [70_000] * 300, [-0.1] * 300, [7] * 300, "stop")
    assert len(pickle.dumps(turn)) < 4 * 1000 + 12 * 300 + 200


def test_an_id_that_fits_no_vocabulary_is_refused_where_it_is_sent() -> None:
    with pytest.raises(OverflowError):
        pickle.dumps(Turn([2**31], [], [], [], "stop"))


@given(st.lists(st.integers(0, 2)))
def test_runs_give_back_their_values(values: list[int]) -> None:
    assert values_of(runs_of(values)) == values
    assert all(times > 0 for _, times in runs_of(values))


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Two:
    """Fields with and without a default."""

    one: float
    two: list[int] = field(default_factory=list)


def test_a_dataclass_is_pickled_by_the_values_of_its_fields() -> None:
    back = pickle.loads(pickle.dumps(Two(math.pi, [1])))
    assert back == Two(math.pi, [1])
    assert Two.__reduce__(back) == (Two, (math.pi, [1]))


def test_a_prompt_in_an_array_is_sent_as_an_array() -> None:
    request = GenerationRequest("a", array("i", range(1000)), 1, 1.0, 0, [])
    sent = pickle.dumps(request)
    assert pickle.loads(sent) == request
    assert len(sent) < 4 * 1000 + 400
