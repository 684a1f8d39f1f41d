"""The sum of the channels, what a channel that is off costs, and who computes it.

Bounds of shares: exact factors, the smallest change that keeps them, clear refusals.

ECHO trains the contents of tool results, divided by their number, in the policy's forward.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from step_batches import Make, own_logprobs
from torch import Tensor

from composer_mesh.channels.echo import Echo
from composer_mesh.channels.policy import policy_sample
from composer_mesh.channels.port import make_channel
from composer_mesh.channels.step import RunningSums, StepLoss, step_loss, step_metrics
from composer_mesh.channels.weights import bounded_factors, update_shares
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services.steps.batcher import ChannelSamples
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

FOLDERS = ("actors", "channels", "plugins", "services")


CALLERS = {"actors/learning/update_pass.py", "actors/learning/replay_channel.py"}


CALLERS_IN_PLUGINS = {
    "plugins/frameworks/areal_training.py",
    "plugins/frameworks/harness.py",
    "plugins/frameworks/pair_gradients.py",
    "plugins/frameworks/prime_rl.py",
    "plugins/frameworks/trl/channels.py",
    "plugins/frameworks/verl/losses.py",
    "plugins/tinker/client/step.py",
    "plugins/tinker/client_losses.py",
}


WEIGHTS = {"sdpo": 0.5, "replay": 0.25}


def scalar(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def summed(weights: dict[str, float] | None = None, **losses: Tensor | None) -> StepLoss:
    terms = {name: (lambda loss=loss: loss) for name, loss in losses.items()}
    return step_loss(terms, WEIGHTS if weights is None else weights)


def test_the_total_is_the_weighted_sum_and_so_is_its_gradient() -> None:
    losses = {"policy": scalar(1.0), "sdpo": scalar(10.0), "replay": scalar(100.0)}
    found = summed(**losses)
    found.total().backward()
    assert found.total().item() == 1 + 5 + 25
    assert [loss.grad.item() for loss in losses.values() if loss.grad is not None] == [1, 0.5, 0.25]
    assert {name: loss.item() for name, loss in found.losses.items()} == {
        "policy": 1,
        "sdpo": 10,
        "replay": 100,
    }


def test_losses_of_no_channel_are_counted_with_the_policy() -> None:
    terms = {"sdpo": lambda: scalar(2.0)}
    found = step_loss(terms, WEIGHTS, others=[scalar(3.0), scalar(4.0)])
    assert {name: loss.item() for name, loss in found.by_channel().items()} == {
        "policy": 7,
        "sdpo": 1,
    }
    assert found.total().item() == 8
    assert list(found.losses) == ["sdpo"]


def test_a_channel_without_data_is_no_part_of_the_graph_and_is_off() -> None:
    found = summed(policy=scalar(1.0), sdpo=None)
    assert found.losses.keys() == found.weighted.keys() == {"policy"}
    metrics = step_metrics({"policy": 1.0}, {"policy": 1.0, "sdpo": 0.5})
    assert metrics == {"loss/total": 1.0, "loss/policy": 1.0, "loss/sdpo": None}


def test_the_metrics_hold_unweighted_losses_and_null_for_what_is_off() -> None:
    sums = RunningSums()
    sums.add({"policy": torch.tensor(1.0), "sdpo": torch.tensor(7.0), "replay": torch.tensor(1.0)})
    sums.add({"replay": torch.tensor(2.0)})
    assert sums.read().metrics({"policy": 1.0, "sdpo": 0.0, "replay": 2.0, "other": 1.0}) == {
        "loss/total": 7.0,
        "loss/policy": 1.0,
        "loss/sdpo": None,
        "loss/replay": 3.0,
        "loss/other": None,
    }


def test_the_reported_losses_are_detached() -> None:
    found = summed(policy=scalar(1.0), sdpo=scalar(1.0), replay=scalar(1.0))
    assert not any(loss.requires_grad for loss in found.losses.values())


def test_a_step_without_any_channel_has_a_zero_that_can_be_differentiated() -> None:
    found = summed(policy=None)
    found.total().backward()
    assert found.total().item() == 0
    assert step_metrics({}, {"policy": 1.0})["loss/total"] == 0


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_an_impossible_weight_is_named_with_its_bound(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight of sdpo is .* finite and >= 0: set it to 0"):
        summed({"sdpo": weight}, sdpo=scalar(1.0))


def files_with(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The files with one of some words, parsed."""
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path, ast.parse(text)


def calls(module: ast.Module) -> set[str]:
    """The names of the functions that a module calls."""
    called = (node.func for node in ast.walk(module) if type(node) is ast.Call)
    return {node.id for node in called if isinstance(node, ast.Name)}


def test_every_kind_of_step_calls_the_one_function() -> None:
    """The trainer, the harness, TRL, verl, AReaL, clients and the server's loss for them."""
    files = files_with("step_loss")
    found = {str(path.relative_to(ROOT)) for path, one in files if "step_loss" in calls(one)}
    there = CALLERS_IN_PLUGINS if (ROOT / "plugins").is_dir() else set()
    assert found == CALLERS | there


def is_weight(node: ast.expr) -> bool:
    """Whether an expression is the weight of a channel: alpha or beta of a config or step."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("alpha", "beta", "alpha_sdpo", "beta_replay")


def test_no_other_code_weights_the_loss_of_a_channel() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path, module in files_with("alpha", "beta")
        for node in ast.walk(module)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (is_weight(node.left) or is_weight(node.right))
    }
    assert not found


NORMS = {"policy": 1.0, "sdpo": 2.0, "replay": 1.0}


def test_shares_are_norms_over_their_sum_and_undefined_without_a_gradient() -> None:
    assert update_shares(NORMS) == {"policy": 0.25, "sdpo": 0.5, "replay": 0.25}
    assert update_shares({"policy": 0.0, "sdpo": 0.0}) == {}


def test_shares_within_their_bounds_change_nothing() -> None:
    found = bounded_factors(NORMS, {"sdpo": (0.1, 0.6), "replay": (0.25, 0.25)})
    assert found == dict.fromkeys(NORMS, 1.0)


def test_factors_are_the_least_that_keep_all_bounds() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        norms = {name: 10 ** rng.uniform(-6, 3) for name in NORMS}
        bounds = {}
        for name in ("sdpo", "replay"):
            low, high = sorted((rng.choice([0.0, rng.random() * 0.49]), rng.uniform(0.05, 1)))
            bounds[name] = (min(low, 0.49), high)
        factors = bounded_factors(norms, bounds)
        scaled = {name: factors[name] * norm for name, norm in norms.items()}
        total = math.fsum(scaled.values())
        assert factors["policy"] == 1
        for name, (low, high) in bounds.items():
            share = scaled[name] / total
            assert low * (1 - 1e-9) <= share <= high * (1 + 1e-9)
            if factors[name] > 1 + 1e-12:
                assert share == pytest.approx(low, rel=1e-9)
            if factors[name] < 1 - 1e-12:
                assert share == pytest.approx(high, rel=1e-9)


def test_without_a_policy_gradient_the_bounds_hold_among_the_other_channels() -> None:
    norms = {"policy": 0.0, "sdpo": 3.0, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.1), "replay": (0.5, 1.0)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1 / 27, "replay": 1}, rel=1e-12)


def test_upper_bounds_that_leave_room_for_the_policy_become_shares_of_each_other() -> None:
    norms = {"policy": 0.0, "sdpo": 0.1, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.35), "replay": (0.0, 0.3)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1, "replay": 0.1 * 30 / 35}, rel=1e-12)


def test_a_channel_that_is_alone_keeps_its_update() -> None:
    norms = {"policy": 0.0, "sdpo": 3.0, "replay": 0.0}
    factors = bounded_factors(norms, {"sdpo": (0.0, 0.35), "replay": (0.0, 0.3)})
    assert factors == pytest.approx(dict.fromkeys(norms, 1.0), rel=1e-12)


def test_a_channel_without_a_gradient_cannot_be_raised() -> None:
    norms = {"policy": 1.0, "sdpo": 0.0, "replay": 1.0}
    factors = bounded_factors(norms, {"sdpo": (0.5, 1.0), "replay": (0.0, 0.25)})
    assert factors == pytest.approx({"policy": 1, "sdpo": 1, "replay": 1 / 3}, rel=1e-15)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_none_is_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="the norm of sdpo is"):
        bounded_factors({"policy": 1.0, "sdpo": broken}, {"sdpo": (0.1, 0.5)})


@pytest.mark.parametrize("ends", [(0.6, 0.5), (-0.1, 0.5), (0.0, 0.0), (0.1, 1.1)])
def test_bounds_that_are_no_shares_are_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="the bounds of sdpo"):
        bounded_factors(NORMS, {"sdpo": ends})


def test_lower_bounds_that_leave_nothing_to_the_policy_are_refused() -> None:
    for low, other in itertools.product((0.5, 0.7), (0.5, 0.3)):
        if low + other >= 1:
            with pytest.raises(ValueError, match="lower bounds add up"):
                bounded_factors(NORMS, {"sdpo": (low, 1.0), "replay": (other, 1.0)})


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
