"""Experts travel with a rollout as bytes: in messages, in JSON, from turn to turn."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.channels.policy import policy_sample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import EpisodePlayer
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.traces import (
    ExpertChoices,
    Message,
    Trace,
    Turn,
    joined,
    trace_from_json,
    trace_to_json,
)


def choices(positions: int, first: int = 0, width: int = 1) -> ExpertChoices:
    """Of 3 layers and 2 experts a token."""
    contents = bytes((first + n) % 256 for n in range(positions * 6 * width))
    return ExpertChoices(3, 2, width, contents)


def turn(context: int, action: int, experts: ExpertChoices | None) -> Turn:
    one = [1] * action
    return Turn([2] * context, one, [-0.5] * action, one, "stop", experts=experts)


def trace(*turns: Turn) -> Trace:
    return Trace("t", 0, 0, "toolbox", "train", 0, list(turns), [], 0.0, False, [])


def test_a_position_is_one_byte_for_each_layer_and_expert() -> None:
    assert choices(4).positions == 4
    assert len(choices(4).contents) == 24
    assert choices(4, width=2).positions == 4
    assert len(pickle.dumps(choices(1000))) < 6000 + 200


def test_the_turns_of_a_trace_have_experts_of_all_positions_but_the_last() -> None:
    found = trace(turn(4, 3, choices(6)), turn(2, 5, choices(7, first=9)))
    whole = found.expert_choices()
    assert whole is not None
    assert whole.contents == choices(6).contents + choices(7, first=9).contents
    assert whole.positions == len(found.token_ids()) - 1
    assert policy_sample(found, 1.0).experts == whole


def test_a_trace_with_a_turn_without_experts_has_none() -> None:
    assert trace(turn(4, 3, choices(6)), turn(2, 5, None)).expert_choices() is None


def test_experts_of_another_number_of_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="t has experts of 5 positions for 7 tokens"):
        trace(turn(4, 3, choices(5))).expert_choices()


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
    found = trace(turn(40, 3, choices(42)))
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

    async def step(self, session_id: str, text: str) -> StepResult:
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
