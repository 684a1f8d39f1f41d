"""ECHO trains the contents of tool results, divided by their number, in the policy's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import Make, own_logprobs

from composer_mesh.channels.echo import Echo
from composer_mesh.channels.policy.samples import policy_sample
from composer_mesh.channels.port import make_channel
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services.steps.batcher import ChannelSamples
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

WEIGHT = 0.1


@pytest.fixture
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


@pytest.fixture
def traces(chat: ChatFormat, toolbox: ToolboxTask) -> list[Trace]:
    return [played(chat, toolbox, index) for index in range(3)]


def played(chat: ChatFormat, task: ToolboxTask, index: int) -> Trace:
    """An episode by the task's expert, tokenized as rollouts are."""
    session, turns, done = SyncSession(task, task.episode("train", index)), list[Turn](), False
    context = chat.first_prompt(session.messages)
    while not done:
        text = task.expert(session.messages)
        said, action = len(session.messages), chat.action(text)
        turns.append(Turn(context, action, [-0.1] * len(action), [0] * len(action), "stop"))
        done = session.step(text).done
        if not done:
            context = chat.continuation(session.messages[said + 1 :], action)
    name = f"train-{index}"
    return Trace(name, 0, 0, "toolbox", "train", index, turns, session.messages, 1.0, True, [])


def results(trace: Trace) -> list[str]:
    """The tool results that a later action has read."""
    last = trace.action_places()[-1]
    return [one["content"] for one in trace.messages[:last] if one["role"] == "tool"]


def echo(chat: ChatFormat, **kwargs: Any) -> Echo:
    channel = Echo("echo", **kwargs)
    channel.chat = chat
    return channel


def trained_texts(chat: ChatFormat, trace: Trace, values: list[float]) -> list[str]:
    """The runs of ids with a value, as texts."""
    runs: list[list[int]] = []
    before = 0.0
    for token, value in zip(trace.token_ids(), values, strict=True):
        if value and not before:
            runs.append([])
        if value:
            runs[-1].append(token)
        before = value
    return [chat.tokenizer.decode(run) for run in runs]


def test_the_contents_of_tool_results_are_trained_and_nothing_else(
    chat: ChatFormat, traces: list[Trace]
) -> None:
    found = list(echo(chat).samples(traces))
    assert [one.trace_id for one in found] == [trace.trace_id for trace in traces]
    for trace, sample in zip(traces, found, strict=True):
        assert trained_texts(chat, trace, sample.values) == results(trace)
        assert not any(
            own and value for own, value in zip(trace.action_mask(), sample.values, strict=True)
        )


def test_another_role_is_trained_where_it_is_named(chat: ChatFormat) -> None:
    messages: list[Message] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "Answer: 1"},
        {"role": "user", "content": "try again, please"},
        {"role": "assistant", "content": "Answer: 2"},
    ]
    first, second = chat.action("Answer: 1"), chat.action("Answer: 2")
    contexts = chat.first_prompt(messages[:1]), chat.continuation(messages[2:3], first)
    turns = [
        Turn(context, action, [0.0] * len(action), [0] * len(action), "stop")
        for context, action in zip(contexts, (first, second), strict=True)
    ]
    trace = Trace("t", 0, 0, "toolbox", "train", 0, turns, messages, 0.0, False, [])
    (tool,), (user,) = (
        list(echo(chat, roles=roles).samples([trace])) for roles in (["tool"], ["user"])
    )
    assert not any(tool.values)
    assert trained_texts(chat, trace, user.values) == ["try again, please"]


def test_ids_that_the_format_would_not_have_made_count_wholly(
    chat: ChatFormat, traces: list[Trace]
) -> None:
    first, second, *others = traces[0].turns
    foreign = replace(second, context_ids=[1] * 5)
    (sample,) = echo(chat).samples([replace(traces[0], turns=[first, foreign, *others])])
    begin = len(first.context_ids) + len(first.action_ids)
    assert sample.values[begin : begin + 5] == [1.0] * 5


def test_the_loss_is_the_weighted_cross_entropy_divided_by_the_number_of_trained_ids(
    make: Make,
    build_config: Callable[..., Config],
    chat: ChatFormat,
    traces: list[Trace],
) -> None:
    """As prime-rl defines it: ce / N, with N over the step, and weight times that in the total."""
    sections: dict[str, Any] = {
        "channels": {"echo": {"import_path": "echo", "weight": WEIGHT}},
        "trainer": {"microbatch_tokens": 512},
    }
    config = build_config(**sections)
    model, step = make(2, **sections)
    samples = ChannelSamples(config, chat).of(traces)
    batch = StepBatch(0, [policy_sample(one, 0.0) for one in traces], [], [], channels=samples)
    wanted, count = 0.0, 0
    for trace, sample in zip(traces, samples["echo"], strict=True):
        with torch.no_grad():
            logprobs = own_logprobs(model, trace.token_ids())
        places = [place for place, value in enumerate(sample.values) if value]
        wanted -= sum(float(logprobs[place - 1]) for place in places)
        count += len(places)
    found = step.run(batch, None)
    texts = [text for one in traces for text in results(one)]
    assert count == sum(len(chat.controls.encode(text, {})) for text in texts)
    assert found["loss/echo"] == pytest.approx(wanted / count, rel=1e-5)
    assert found["loss/total"] == pytest.approx(WEIGHT * wanted / count, rel=1e-5)


def test_it_is_found_by_name_and_refuses_roles_that_are_the_policy_s(
    build_config: Callable[..., Config],
) -> None:
    section = build_config(channels={"echo": {"import_path": "echo", "weight": 0.1}}).channels
    assert isinstance(make_channel("echo", section["echo"]), Echo)
    with pytest.raises(ValueError, match="write some of tool, user, system"):
        Echo("echo", roles=["assistant"])
