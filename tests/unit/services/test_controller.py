"""The controller: the order of a run, its lag bound and its end, on ports that are fakes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from controller_world import (
    CHANNELS,
    MakeWorld,
    World,
    controller_of,
    finished,
    others,
    trace_of,
)
from fake_store import Broken
from repetition import repeated

from composer_mesh import SyncSession
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import PromptTooLong, Sample, Sampling
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.episodes.rollout import RolloutsFail
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.tasks.toolbox import ToolboxTask


@pytest.fixture(scope="module")
def make_world(tokenizer: Any, toolbox: ToolboxTask) -> MakeWorld:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda **options: World(toolbox, chat, **options)


@pytest.fixture(params=repeated([0, 1, 2], first=2))
def max_lag(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def config(build_config: Any, max_lag: int) -> Config:
    schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": max_lag}
    return build_config(run={"name": "unit", "seed": 3, "steps": 5}, schedule=schedule, **CHANNELS)


@pytest.mark.parametrize("seed", repeated(range(3), first=2))
async def test_no_token_is_older_than_max_lag_whatever_overtakes_what(
    make_world: MakeWorld, config: Config, seed: int
) -> None:
    world = make_world(seed=seed)
    await finished(world, config)
    for batch in world.names("trained"):
        ids = {sample.trace_id for sample in batch.samples}
        stored = [trace for trace in world.names("stored") if trace.trace_id in ids]
        versions = [v for trace in stored for turn in trace.turns for v in turn.versions]
        assert batch.step - min(versions) <= config.schedule.max_lag
        assert max(versions) <= batch.step
    lags = [metrics["lag/max"] for metrics in world.names("metrics")]
    assert max(lags) <= config.schedule.max_lag


async def test_rollouts_run_ahead_as_far_as_they_may_and_no_further(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=1)
    await finished(world, config)
    lags = [metrics["lag/max"] for metrics in world.names("metrics")]
    assert max(lags) == config.schedule.max_lag


async def test_a_trace_is_stored_before_its_teachers_are_asked_and_before_it_is_trained_on(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=2)
    await finished(world, config)
    stored: set[str] = set()
    paired: set[str] = set()
    for kind, what in world.done:
        if kind == "stored":
            stored.add(what.trace_id)
        elif kind == "asked":
            assert what in stored
        elif kind == "pair":
            paired.add(what.pair_id)
        elif kind == "trained":
            assert {sample.trace_id for sample in what.samples} <= stored
            assert {pair.pair_id for pair in what.pairs} <= paired
    assert world.names("asked")


async def test_every_step_takes_the_next_groups_whole_and_in_order(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=3)
    controller = await finished(world, config)
    taken = [[sample.trace_id for sample in batch.samples] for batch in world.names("trained")]
    assert taken == [
        [f"train-{group:06d}-{n:03d}" for group in (2 * s, 2 * s + 1) for n in range(3)]
        for s in range(5)
    ]
    assert controller.step == 5
    assert [metrics["step"] for metrics in world.names("metrics")] == [1, 2, 3, 4, 5]
    assert world.names("shown") == [1, 2, 3, 4, 5]
    assert world.names("served") == [1, 2, 3, 4, 5]


async def test_all_three_channels_get_their_data(make_world: MakeWorld, config: Config) -> None:
    world = make_world(seed=4)
    await finished(world, config)
    batches = world.names("trained")
    assert sum(len(batch.views) for batch in batches) > 0
    assert sum(len(batch.pairs) for batch in batches) > 0
    before: set[str] = set()
    for batch, metrics in zip(batches, world.names("metrics"), strict=True):
        trained = {sample.trace_id for sample in batch.samples}
        assert {view.trace_id for view in batch.views} <= trained
        before = trained if config.pairs_wait else before | trained
        assert {pair.pair_id.rpartition("/")[0] for pair in batch.pairs} <= before
        assert metrics["replay/usd"] == pytest.approx(0.02 * metrics["replay/states"])


async def test_a_channel_that_is_off_asks_nobody_and_shows_no_hint(
    make_world: MakeWorld, build_config: Any
) -> None:
    world = make_world(seed=4)
    await finished(world, build_config())
    assert world.names("asked") == []
    assert all(batch.views == batch.pairs == [] for batch in world.names("trained"))


async def test_a_run_evaluates_before_and_after_and_saves_in_between(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=5)
    controller = await finished(world, config)
    landmarks = [
        (kind, what) for kind, what in world.done if kind in ("evaluated", "served", "saved")
    ]
    assert landmarks == [
        ("evaluated", 0),
        *[("served", version) for version in range(1, 6)],
        ("saved", 5),
        ("evaluated", 5),
    ]
    assert controller.evaluations == [
        Evaluation(0, 1.0, 4, temperature=0.0),
        Evaluation(5, 1.0, 4, temperature=0.0),
    ]
    assert world.sessions == {}


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5])])
async def test_a_run_pauses_to_evaluate_as_often_as_asked_and_once_at_the_end(
    make_world: MakeWorld, config: Config, every: int, steps: list[int]
) -> None:
    world = make_world(seed=5)
    asked = config.model_copy(update={"eval": config.eval.model_copy(update={"every": every})})
    controller = await finished(world, asked)
    assert world.names("evaluated") == world.names("measured") == steps
    assert [evaluation.step for evaluation in controller.evaluations] == steps


async def test_evaluation_episodes_are_held_out_and_are_not_stored(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=6)
    await finished(world, config)
    resume_state = world.names("begin")
    heldout = [name for name in resume_state if name.startswith("heldout")]
    assert sorted(heldout) == sorted(2 * [f"heldout-{n:06d}-000" for n in range(4)])
    assert {trace.split for trace in world.names("stored")} == {"train"}


async def test_an_evaluation_runs_the_heldout_episodes_that_were_found_before_and_no_others(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=6)
    controller = replace(controller_of(world, config), heldout=[1, 3])
    await controller.run()
    begun = {name for name in world.names("begin") if name.startswith("heldout")}
    assert begun == {"heldout-000001-000", "heldout-000003-000"}
    assert [evaluation.episodes for evaluation in controller.evaluations] == [2, 2]


async def test_steps_are_built_beside_the_event_loop(make_world: MakeWorld, config: Config) -> None:
    moved = threading.Event()

    class WaitingBuilder(StepBuilder):
        def compose(self, *args: Any) -> Any:
            moved.clear()
            assert moved.wait(60), "the loop stood still while a step was built"
            return super().compose(*args)

    controller = controller_of(make_world(seed=6), config)
    controller.step_builder = WaitingBuilder(controller.step_builder.batcher)
    controller.ports = replace(controller.ports, in_thread=in_thread)
    running = asyncio.create_task(controller.run())
    while not running.done():
        moved.set()
        await asyncio.sleep(0)
    await running


async def test_the_same_seed_makes_the_same_batches_when_synchronous(
    make_world: MakeWorld, build_config: Any
) -> None:
    """The order in which samples get on differs; what a step trains on does not."""
    worlds = [make_world(seed=seed) for seed in (7, 8)]
    for world in worlds:
        await finished(world, build_config(**CHANNELS))
    one, two = (world.names("trained") for world in worlds)
    assert one == two


STORE = ["add_group", "add_teacher_queries", "plan_step", "end_step"]
PORTS = ["query", "score", "train", "sync", "save", *STORE]


@pytest.mark.parametrize("port", PORTS)
async def test_a_port_that_fails_ends_the_run_with_its_error_and_leaves_nothing_running(
    make_world: MakeWorld, config: Config, port: str
) -> None:
    world = make_world(seed=9, broken=port)
    with pytest.raises(Broken, match=port):
        await finished(world, config)
    assert others() == set()


@pytest.mark.parametrize("port", ["begin", "generation", "step", "finish"])
async def test_an_environment_or_a_policy_that_always_fails_ends_the_run_and_says_so(
    make_world: MakeWorld, config: Config, port: str
) -> None:
    world = make_world(seed=9, broken=port)
    with pytest.raises(RolloutsFail, match=f"none of 4 held-out .* Broken: {port}: correct"):
        await finished(world, config)
    assert world.names("evaluated") == []
    assert world.sessions == {}
    assert others() == set()


async def test_a_run_that_is_cancelled_at_any_moment_leaves_nothing_running(
    make_world: MakeWorld, build_config: Any
) -> None:
    config = build_config(
        **CHANNELS, schedule={"max_lag": 1, "group_size": 2}, eval={"episodes": 1}
    )
    for moment in range(120):
        running = asyncio.create_task(controller_of(make_world(seed=10), config).run())
        for _ in range(moment):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert others() == set(), moment


@pytest.mark.parametrize("port", ["begin", "generation", "step", "query", "train", "sync", "save"])
async def test_a_run_that_hangs_can_be_cancelled_and_keeps_what_was_finished(
    make_world: MakeWorld, config: Config, port: str
) -> None:
    world = make_world(seed=11, hang=port)
    running = asyncio.create_task(finished(world, config))
    for _ in range(3000):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert others() == set()
    ahead = config.schedule.max_lag + 1
    if port in ("train", "sync") or (port == "query" and config.pairs_wait):
        assert len(world.names("stored")) == 3 * 2 * ahead
    elif port == "query":
        assert world.trained == config.run.steps  # silent teachers block no step


async def test_a_trace_is_the_conversation_token_for_token(
    make_world: MakeWorld, config: Config
) -> None:
    world = make_world(seed=12)
    await finished(world, config)
    chat, render = world.chat, world.chat.tokenizer.apply_chat_template
    for trace in world.names("stored"):
        whole = render(trace.messages, tools=chat.tools, tokenize=False)
        text = chat.tokenizer.decode(trace.token_ids())
        assert whole.rstrip("\n") == text


def sample_of(world: World, max_context: int, answer: int = 64) -> Sample:
    """A sample of the first episode, greedy, in a context of so many tokens beyond its prompt."""
    episode = world.task.episode("train", 0)
    opening = len(world.chat.first_prompt(SyncSession(world.task, episode).messages))
    return Sample(episode, 0, 0, Sampling(0.0, answer, opening + max_context, 0))


async def test_an_episode_fills_its_context_and_ends_there_without_success(
    make_world: MakeWorld,
) -> None:
    """Whatever the context is, no request and no trace is longer, and no answer is lost for it."""
    endless = sample_of(make_world(seed=13), 10_000)
    whole = await trace_of(make_world(seed=13), endless)
    opening, needed = len(whole.prompt_ids(0)), len(whole.token_ids())
    assert (len(whole.turns) > 1, whole.success) == (True, True)
    answer = max(len(turn.action_ids) for turn in whole.turns)
    last = []
    for remaining in range(
        answer, needed - opening - 1
    ):  # whoever lacks only the stop token has said all
        world = make_world(seed=13)
        sample = sample_of(world, remaining, answer)
        trace = await trace_of(world, sample)
        assert len(trace.token_ids()) <= opening + remaining
        assert trace.token_ids() == whole.token_ids()[: len(trace.token_ids())]
        assert (trace.success, trace.reward) == (False, 0.0)
        assert world.sessions == {}
        cut = trace.turns[-1].stop_reason == "length"
        assert not cut or len(trace.token_ids()) == opening + remaining
        last.append((len(trace.turns), cut))
    assert {cut for _, cut in last} == {True, False}
    assert {turns for turns, _ in last} == set(range(last[0][0], len(whole.turns) + 1))


async def test_a_prompt_that_leaves_no_room_for_a_turn_is_refused_with_the_repair(
    make_world: MakeWorld,
) -> None:
    world = make_world(seed=13)
    sample = sample_of(world, 63)
    message = r"train-000000-000 begins with \d+ tokens .* raise policy\.max_context"
    with pytest.raises(PromptTooLong, match=message):
        await trace_of(world, sample)
    assert world.sessions == {}
