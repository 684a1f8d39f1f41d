"""Traces: token ids are whole, each sampled one is accounted for, and a line of JSON is enough.

Experts travel with a rollout as bytes: in messages, in JSON, from turn to turn.

Pickles of the messages of rollout workers give back what was sent, in few bytes.
"""

from __future__ import annotations

import math
import pickle
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.channels.policy import policy_sample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import EpisodePlayer
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.traces import (
    ErrorSite,
    ExpertChoices,
    Message,
    Trace,
    Turn,
    equal_rewards,
    joined,
    pickled_by_position,
    runs_of,
    trace_from_json,
    trace_to_json,
    values_of,
)

IDS = st.lists(st.integers(0, 999), min_size=1, max_size=6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    action = draw(IDS)
    logprobs = draw(
        st.lists(st.floats(-40, 0), min_size=len(action), max_size=len(action)),
    )
    versions = draw(st.lists(st.integers(0, 9), min_size=len(action), max_size=len(action)))
    return Turn(draw(IDS), action, logprobs, versions, draw(st.sampled_from(["stop", "length"])))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    sites = draw(st.lists(st.builds(ErrorSite, st.integers(0, 3), TEXT, TEXT, st.just({"k": "v"}))))
    messages: list[Message] = [
        {"role": "user", "content": draw(TEXT)},
        {"role": "assistant", "tool_calls": []},
    ]
    return Trace(
        draw(TEXT),
        draw(st.integers(0, 99)),
        draw(st.integers(0, 9)),
        "toolbox",
        draw(st.sampled_from(["train", "heldout"])),
        draw(st.integers(0, 99)),
        draw(st.lists(turns(), max_size=4)),
        messages,
        draw(st.floats(0, 1)),
        draw(st.booleans()),
        sites,
    )


@given(traces())
def test_a_line_of_json_gives_the_same_trace_back(trace: Trace) -> None:
    line = trace_to_json(trace)
    assert b"\n" not in line
    assert trace_from_json(line) == trace


@given(traces())
def test_the_mask_selects_exactly_the_sampled_ids_in_order(trace: Trace) -> None:
    ids, mask = trace.token_ids(), trace.action_mask()
    assert len(ids) == len(mask)
    sampled = [token for token, own in zip(ids, mask, strict=True) if own]
    assert sampled == [token for turn in trace.turns for token in turn.action_ids]
    assert trace.action_tokens() == sum(mask)


@given(traces())
def test_what_the_policy_had_read_at_a_turn_is_a_prefix_of_the_trace_up_to_its_action(
    trace: Trace,
) -> None:
    ids = trace.token_ids()
    for index, turn in enumerate(trace.turns):
        prompt = trace.prompt_ids(index)
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) : len(prompt) + len(turn.action_ids)] == turn.action_ids


def test_the_oldest_version_is_that_of_the_oldest_token_of_any_turn() -> None:
    one = Turn([1], [2, 3], [0.0, 0.0], [4, 5], "stop")
    two = Turn([1], [2, 3], [0.0, 0.0], [3, 9], "stop")
    trace = Trace("t", 0, 0, "toolbox", "train", 0, [one, two], [], 0.0, False, [])
    assert trace.oldest_version() == 3


@pytest.mark.parametrize(
    ("logprobs", "versions"), [([0.0], [1, 1]), ([0.0, 0.0], [1]), ([], []), ([0.0] * 3, [1] * 3)]
)
def test_an_action_token_without_its_log_prob_or_version_is_refused(
    logprobs: list[float], versions: list[int]
) -> None:
    message = f"2 action ids, {len(logprobs)} log-probs and {len(versions)} versions"
    with pytest.raises(ValueError, match=message):
        Turn([7], [8, 9], logprobs, versions, "stop")


@pytest.mark.parametrize("line", ["", "{}", '{"trace_id": 3}', "[1]"])
def test_a_line_that_is_no_trace_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        trace_from_json(line)


def rewarded(reward: float, **fields: Any) -> Trace:
    turns = [Turn([1], [2], [-1.0], [0], "stop")] * 2
    return Trace("a", 0, 0, "t", "train", 0, turns, [], reward, False, [], **fields)


def test_a_group_has_equal_rewards_if_all_that_is_compared_is_equal() -> None:
    one = rewarded(1.0)
    assert equal_rewards([])
    assert equal_rewards([one, one])
    assert not equal_rewards([one, rewarded(0.0)])
    assert not equal_rewards([one, rewarded(1.0, turn_rewards=[1.0, 0.0])])
    worker, idle = (rewarded(reward, role="worker") for reward in (0.5, 0.0))
    assert equal_rewards([replace(one, others=[worker]), replace(one, others=[worker])])
    assert not equal_rewards([replace(one, others=[worker]), replace(one, others=[idle])])


def test_a_group_with_an_advantage_of_its_own_is_trained_unless_that_is_0() -> None:
    assert not equal_rewards([rewarded(1.0, advantage=0.5), rewarded(1.0, advantage=0.5)])
    assert not equal_rewards([rewarded(1.0, turn_advantages=[0.0, 0.5])])
    assert equal_rewards([rewarded(1.0, advantage=0.0), rewarded(0.0, advantage=0.0)])


def test_the_outcome_is_the_reward_without_those_of_turns() -> None:
    assert rewarded(0.3).outcome == 0.3
    assert rewarded(1.5, turn_rewards=[0.25, 0.25]).outcome == 1.0


def test_numbers_of_turns_are_one_for_each_or_none() -> None:
    with pytest.raises(ValueError, match="1 turn_advantages for 2 turns: give one number for each"):
        rewarded(1.0, turn_advantages=[1.0])


def choices(positions: int, first: int = 0, width: int = 1) -> ExpertChoices:
    """Of 3 layers and 2 experts a token."""
    contents = bytes((first + n) % 256 for n in range(positions * 6 * width))
    return ExpertChoices(3, 2, width, contents)


def routed_turn(context: int, action: int, experts: ExpertChoices | None) -> Turn:
    one = [1] * action
    return Turn([2] * context, one, [-0.5] * action, one, "stop", experts=experts)


def routed_trace(*turns: Turn) -> Trace:
    return Trace("t", 0, 0, "toolbox", "train", 0, list(turns), [], 0.0, False, [])


def test_a_position_is_one_byte_for_each_layer_and_expert() -> None:
    assert choices(4).positions == 4
    assert len(choices(4).contents) == 24
    assert choices(4, width=2).positions == 4
    assert len(pickle.dumps(choices(1000))) < 6000 + 200


def test_the_turns_of_a_trace_have_experts_of_all_positions_but_the_last() -> None:
    found = routed_trace(routed_turn(4, 3, choices(6)), routed_turn(2, 5, choices(7, first=9)))
    whole = found.expert_choices()
    assert whole is not None
    assert whole.contents == choices(6).contents + choices(7, first=9).contents
    assert whole.positions == len(found.token_ids()) - 1
    assert policy_sample(found, 1.0).experts == whole


def test_a_trace_with_a_turn_without_experts_has_none() -> None:
    assert (
        routed_trace(routed_turn(4, 3, choices(6)), routed_turn(2, 5, None)).expert_choices()
        is None
    )


def test_experts_of_another_number_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="t has experts of 5 positions for 7 tokens"):
        routed_trace(routed_turn(4, 3, choices(5))).expert_choices()


def test_experts_of_unlike_models_are_not_joined() -> None:
    with pytest.raises(ValueError, match="those of one rollout are of one model"):
        joined([choices(2), choices(2, width=2)])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((3, 2, 1, b"12345"), "no whole number"),
        ((0, 2, 1, b""), "at least 1"),
        ((3, 2, 4, b""), "bytes 1 or 2"),
    ],
)
def test_bytes_of_another_shape_are_refused(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ExpertChoices(*given)


def test_experts_come_back_from_json_and_from_a_message() -> None:
    found = routed_trace(routed_turn(40, 3, choices(42)))
    assert trace_from_json(trace_to_json(found)) == found
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(ValidationError):
        trace_from_json(trace_to_json(found).replace(b'"contents":"', b'"contents":"?'))


@pytest.fixture(scope="module")
def chat(tokenizer: Any, toolbox: Any) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


class Telling(ScriptedGeneration):
    """Answers with the experts of the positions that a request asks for."""

    async def generate(self, request: GenerationRequest, group: str) -> GenerationResult:
        result = await super().generate(request, group)
        if request.experts_from is None:
            return result
        end = len(request.prompt_ids) + len(result.token_ids) - 1
        numbers = bytes(at % 256 for at in range(request.experts_from, end) for _ in range(6))
        return replace(result, experts=ExpertChoices(3, 2, 1, numbers))


class TwoTurns:
    """Environments that answer once."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = [[{"role": "tool", "content": "5", "tool_call_id": "a"}]]

    async def begin(self, session_id: str, episode: Any) -> list[Message]:
        return [{"role": "user", "content": "2 + 3?"}]

    async def step(self, session_id: str, text: str, _turn: object = None) -> StepResult:
        return (
            StepResult(self.heard.pop(), False, None) if self.heard else StepResult([], True, None)
        )

    async def finish(self, session_id: str) -> Outcome:
        return Outcome([], 1.0, True)

    def abandon(self, session_id: str) -> None: ...


async def test_each_turn_asks_for_the_experts_that_no_turn_before_it_has(chat: ChatFormat) -> None:
    generation = Telling(chat, "I add.", "Answer: 5")
    player = EpisodePlayer(generation, TwoTurns(), chat)
    found = (await player.play(a_sample(experts=True), "s")).trace
    experts = found.expert_choices()
    assert experts is not None
    positions = len(found.token_ids()) - 1
    assert experts.contents == bytes(at % 256 for at in range(positions) for _ in range(6))
    first = found.turns[0]
    starts = [one.experts_from for one in generation.requests]
    assert starts == [0, len(first.context_ids) + len(first.action_ids) - 1]


async def test_without_router_replay_no_experts_are_asked_for(chat: ChatFormat) -> None:
    generation = Telling(chat, "I add.", "Answer: 5")
    found = (await EpisodePlayer(generation, TwoTurns(), chat).play(a_sample(), "s")).trace
    assert [one.experts_from for one in generation.requests] == [None, None]
    assert found.expert_choices() is None


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"rollouts": {"workflow": "a:B"}}, "rollouts.workflow is 'a:B', whose turns do not carry"),
        ({"trainer": {"prefix_sharing": True}}, "moe.router_replay is True but prefix_sharing is"),
        ({"trainer": {"compile": True}}, "moe.router_replay is True but compile is true"),
    ],
)
def test_router_replay_is_refused_where_experts_do_not_travel(
    sections: dict[str, Any], why: str, build_config: Any
) -> None:
    trainer = {"moe": {"router_replay": True}, **sections.pop("trainer", {})}
    with pytest.raises(ValidationError, match=why):
        build_config(trainer=trainer, **sections)


SENT_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
NUMBERS = st.floats(width=64)


@given(
    SENT_IDS,
    st.lists(st.tuples(st.integers(0, 2**31 - 1), NUMBERS, st.integers(0, 3)), max_size=20),
)
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
