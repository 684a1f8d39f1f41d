"""A channel that is not ours, written outside of the tree, alongside our three."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import Guide
from pydantic import ValidationError
from step_batches import ALL_ON, NARROW, Make, batch_of, own_logprobs, sampled_trace, taught

from composer_mesh.channels.policy import policy_sample
from composer_mesh.channels.port import make_channel
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.step_plan import minibatches
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.checks.accepting import check_custom_functions
from composer_mesh.services.directory.report import summarize
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.tasks.toolbox import ToolboxTask

(MODULE,) = Guide.read("channels.md").blocks("python")
"""The channel of the docs page."""

MISTAKES = """

class Short(Observations):
    def samples(self, traces):
        return [ChannelSample(traces[0].trace_id, [1.0])]


class Unknown(Observations):
    def samples(self, traces):
        return [ChannelSample("nobody", [1.0])]


class Twice(Observations):
    def samples(self, traces):
        return [*super().samples(traces), *super().samples(traces)]


class NotFinite(Observations):
    def samples(self, traces):
        for sample in super().samples(traces):
            yield ChannelSample(sample.trace_id, [float("nan") for _ in sample.values])


class Endless(Observations):
    def samples(self, traces):
        import threading

        threading.Event().wait()


class Broken(Observations):
    def samples(self, traces):
        raise KeyError("no such turn")


class NoScalar(Observations):
    def loss(self, rows):
        return rows.logprobs, {}


class NoGradient(Observations):
    def loss(self, rows):
        return rows.logprobs.detach().sum(), {}


class NoFigure(Observations):
    def loss(self, rows):
        return rows.logprobs.sum(), {"nats": None}


class NoNumber(Observations):
    def normalizer(self, samples):
        return None


class Nothing(Observations):
    def normalizer(self, samples):
        return 0


def no_channel(name):
    return name
"""

Sections = dict[str, Any]


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_channel.py").write_text(MODULE + MISTAKES)
    monkeypatch.syspath_prepend(tmp_path)


def section(name: str = "Observations", **keys: Any) -> Sections:
    return {"channels": {"observations": {"import_path": f"users_channel:{name}", **keys}}}


def traces_of(model: Any, rng: random.Random) -> list[Trace]:
    found = [sampled_trace(model, rng, f"t{n}") for n in range(4)]
    return [one for one in found if len(one.turns) > 1]


def with_samples(model: Any, rng: random.Random, config: Config, **kwargs: Any) -> StepBatch:
    """A batch of all channels, with the samples that the user's channel makes of its rollouts."""
    batch = batch_of(model, rng, pairs=2)
    traces = traces_of(model, rng)
    channel = make_channel("observations", config.channels["observations"])
    samples = [policy_sample(trace, rng.uniform(-1, 1)) for trace in traces]
    names = [f"own{n}" for n in range(len(traces))]
    own = [replace(one, trace_id=name) for one, name in zip(samples, names, strict=True)]
    found = list(channel.samples(traces))
    observed = [replace(one, trace_id=name) for one, name in zip(found, names, strict=True)]
    return replace(
        batch, samples=[*batch.samples, *own], channels={"observations": observed}, **kwargs
    )


def test_the_channel_is_forty_lines_and_no_file_of_the_tree_knows_it() -> None:
    assert len(MODULE.splitlines()) <= 40


@pytest.mark.parametrize("budget", [64, 4096])
def test_it_trains_alongside_the_three_divided_by_its_own_count(
    make: Make, rng: random.Random, build_config: Callable[..., Config], budget: int
) -> None:
    sections = {**NARROW, **ALL_ON, **section(weight=0.25, kwargs={"share": 2.0})}
    model, step = make(2, **sections, trainer={"microbatch_tokens": budget})
    batch = with_samples(model, rng, build_config(**sections))
    wanted, count = 0.0, 0
    for sample in batch.channels["observations"]:
        ids = next(one.ids for one in batch.samples if one.trace_id == sample.trace_id)
        with torch.no_grad():
            logprobs = own_logprobs(model, ids)
        places = [place for place, value in enumerate(sample.values) if value]
        wanted -= sum(float(logprobs[place - 1]) for place in places)
        count += len(places)
    found = taught(step, make(3)[0], batch)
    assert found["loss/observations"] == pytest.approx(2 * wanted / count, rel=1e-4)
    assert found["observations/nats"] == pytest.approx(wanted / count, rel=1e-4)
    assert found["observations/weight"] == 0.25
    losses = [found[f"loss/{name}"] for name in ("policy", "sdpo", "replay", "observations")]
    weighted = zip([1, 0.5, 0.3, 0.25], losses, strict=True)
    assert found["loss/total"] == pytest.approx(sum(w * (one or 0) for w, one in weighted))


def test_its_weight_follows_its_schedule_and_its_share_keeps_its_bound(
    make: Make, rng: random.Random, build_config: Callable[..., Config]
) -> None:
    schedule = {"decay": "linear", "min_ratio": 0.5}
    own = section(weight=50.0, weight_schedule=schedule, max_update_share=0.1)
    sections = {**NARROW, **ALL_ON, **own, "run": {"name": "a", "steps": 4}}
    model, step = make(2, **sections)
    batch, teacher = with_samples(model, rng, build_config(**sections)), make(3)[0]
    for number, share in enumerate((1.0, 0.875, 0.75, 0.625)):
        found = taught(step, teacher, replace(batch, step=number))
        assert found["observations/weight"] == pytest.approx(50 * share)
        assert found["update/share_observations"] == pytest.approx(0.1 * share, rel=1e-3)
        assert found["update/scale_observations"] < 1


def test_its_own_update_is_that_of_an_optimizer_with_its_loss_alone(
    make: Make, rng: random.Random, build_config: Callable[..., Config]
) -> None:
    sections = {**NARROW, **section(weight=0.5, update="own")}
    (model, step), (_, shared) = make(2, **sections), make(2, **NARROW)
    _, together = make(2, **NARROW, **section(weight=0.5))
    batch = replace(with_samples(model, rng, build_config(**sections)), views=[], pairs=[])
    found = step.run(batch, None)
    policy = shared.run(replace(batch, channels={}), None)
    assert found["policy/grad_norm"] == policy["policy/grad_norm"]
    assert found["loss/policy"] == policy["loss/policy"]
    before = together.run(batch, None)["loss/observations"]
    assert found["loss/observations"] != before  # computed after the policy's update
    assert found["observations/lr"] == found["policy/lr"]
    assert found["observations/grad_norm"] > 0


def test_a_channel_of_weight_zero_changes_no_number(make: Make, rng: random.Random) -> None:
    batch_model = make(2)[0]
    batch, teacher = batch_of(batch_model, rng, pairs=2), make(3)[0]
    found = []
    for sections in ({}, section()):
        _, step = make(2, **NARROW, **ALL_ON, **sections)
        found.append(taught(step, teacher, batch))
    assert found[1].pop("loss/observations") is None
    assert found[0] == found[1]


def batcher_of(config: Config, toolbox: ToolboxTask, tokenizer: Any) -> Batcher:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return Batcher(config, toolbox, chat, make_advantages(config.advantage), print)


def test_the_samples_of_a_step_are_made_of_its_rollouts_and_keep_them_in_the_batch(
    make: Make,
    rng: random.Random,
    build_config: Callable[..., Config],
    toolbox: ToolboxTask,
    tokenizer: Any,
) -> None:
    """All rewards are equal, so that without the channel no rollout would be trained."""
    traces = traces_of(make(2)[0], rng)
    batch = batcher_of(build_config(**section(weight=1.0)), toolbox, tokenizer).batch(
        0, [traces], []
    )
    names = [trace.trace_id for trace in traces]
    assert [one.trace_id for one in batch.channels["observations"]] == names
    assert [one.trace_id for one in batch.samples] == names
    for number, part in enumerate(minibatches(regrouped(batch), len(names))):
        assert [one.trace_id for one in part.samples] == [names[number]]
        assert [one.trace_id for one in part.channels["observations"]] == [names[number]]
    off = batcher_of(build_config(**section()), toolbox, tokenizer).batch(0, [traces], [])
    assert not off.channels
    assert not off.samples


def regrouped(batch: StepBatch) -> StepBatch:
    """The batch with each sample in a group of its own."""
    samples = [replace(one, group_id=number) for number, one in enumerate(batch.samples)]
    return replace(batch, samples=samples)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", "has 1 values for .* ids: give one for each"),
        ("Unknown", "a sample is of 'nobody': give one at most for each trace"),
        ("Twice", "give one at most for each trace"),
        ("NotFinite", "values that are not finite"),
        ("Broken", "samples: it raised KeyError: 'no such turn'"),
        ("Endless", "did not return within 0.1 s: look for a loop"),
    ],
)
def test_samples_that_cannot_be_trained_are_refused_by_name(
    make: Make,
    rng: random.Random,
    build_config: Callable[..., Config],
    toolbox: ToolboxTask,
    tokenizer: Any,
    name: str,
    message: str,
) -> None:
    limit = {"supervision": {"custom_function_s": 0.1 if name == "Endless" else 60}}
    batcher = batcher_of(build_config(**section(name, weight=1.0), **limit), toolbox, tokenizer)
    with pytest.raises(CustomFunctionError, match=rf"'users_channel:{name}'.*{message}"):
        batcher.batch(0, [traces_of(make(2)[0], rng)], [])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoScalar", "loss: it returned tuple: return a scalar tensor with a gradient, and a dict"),
        ("NoGradient", "loss: it returned tuple: return a scalar tensor with a gradient"),
        ("NoFigure", "figure 'nats': it raised TypeError"),
        ("NoNumber", "normalizer: it returned None: return a number above 0"),
        ("Nothing", "normalizer: it returned 0: return a number above 0"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused_by_name(
    make: Make, rng: random.Random, build_config: Callable[..., Config], name: str, message: str
) -> None:
    sections = {**NARROW, **section(name, weight=1.0)}
    model, step = make(2, **sections)
    batch = replace(with_samples(model, rng, build_config(**sections)), views=[], pairs=[])
    with pytest.raises(CustomFunctionError, match=message):
        step.run(batch, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_channel",
            "it made a str, which is not a channel: derive it from composer_mesh.Channel",
        ),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_check_refuses_what_is_no_channel_that_can_be_trained(
    build_config: Callable[..., Config], name: str, message: str
) -> None:
    with pytest.raises(CustomFunctionError, match=message):
        check_custom_functions(build_config(**section(name)))


def test_check_takes_the_channel_with_its_arguments_and_refuses_others(
    build_config: Callable[..., Config],
) -> None:
    check_custom_functions(build_config(**section(kwargs={"share": 0.5})))
    with pytest.raises(CustomFunctionError, match="a parameter for each key of kwargs"):
        check_custom_functions(build_config(**section(kwargs={"shares": 0.5})))


@pytest.mark.parametrize("name", ["policy", "sdpo", "replay", "total", "tokens", "Own", "a/b", ""])
def test_names_that_are_taken_or_cannot_be_part_of_a_metric_are_refused(
    build_config: Callable[..., Config], name: str
) -> None:
    with pytest.raises(ValidationError, match=r"metrics of ours begin with|match pattern"):
        build_config(channels={name: {"import_path": "users_channel:Observations"}})


def test_the_summary_counts_its_active_steps() -> None:
    step = {"step": 1, "loss/total": 1.0, "loss/policy": 1.0, "loss/sdpo": None}
    metrics = [step | {"loss/observations": 2.0}, step | {"step": 2, "loss/observations": None}]
    configured = ["policy", "observations"]
    channels = summarize(metrics, wall_s=1.0, configured=configured)["channels"]
    assert channels == {
        "policy": {"configured": True, "active_steps": 2},
        "sdpo": {"configured": False, "active_steps": 0},
        "replay": {"configured": False, "active_steps": 0},
        "observations": {
            "configured": True,
            "active_steps": 1,
            "inactive_because": ["no samples of 0 rollouts"],
        },
    }
