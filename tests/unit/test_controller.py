"""The controller: the order of a run, its lag bound and its end, on ports that are fakes.

The fakes share a `World`: a policy that writes what the task's expert or a bungler would, sessions
of the real toolbox task, and a record of everything that was done, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.pairs import FrozenState, PreferencePair, TeacherAnswer, TeacherReply
from composer_mesh.rollouts.tasks import Episode, Session, StepResult
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.toolbox import ToolboxTask
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.services.advantages import make_advantages
from composer_mesh.services.batcher import Batcher
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.replay.parts import make_pair_stream
from composer_mesh.services.report import Evaluation
from composer_mesh.services.rollout import PromptTooLong, Rollouts, Sampling

Done = tuple[str, Any]
CHANNELS = {
    "sdpo": {"alpha": 0.5},
    "replay": {
        "beta": 0.3,
        "ask": 2,
        "states_per_step": 6,
        "teachers": [{"name": "a", "kind": "builtin"}, {"name": "b", "kind": "builtin"}],
    },
}


class Broken(Exception):
    """What a port raises in these tests."""


@dataclass
class World:
    """All ports of a run but its rollouts and replay, which are the real ones on top of it."""

    task: ToolboxTask
    chat: ChatFormat
    seed: int = 0
    error_rate: float = 0.4
    broken: str = ""
    hang: str = ""
    done: list[Done] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    trained: int = 0
    served: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    async def pause(self, port: str) -> None:
        """A few turns of the loop for others, then the port's own fate."""
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if port == self.broken:
            raise Broken(port)
        if port == self.hang:
            await asyncio.Event().wait()

    def names(self, kind: str) -> list[Any]:
        return [what for done, what in self.done if done == kind]

    def episode(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        session_id = request.request_id.rpartition("-")[0]
        versions: list[int] = []
        ids = self.chat.action(self._policy(request, self.sessions[session_id].messages))
        for _ in ids:
            versions.append(self.served)
            if self.rng.random() < 0.05:
                await self.pause("generation")
        await self.pause("generation")
        return GenerationResult(request.request_id, ids, [-0.5] * len(ids), versions, "stop")

    def _policy(self, request: GenerationRequest, messages: list[Message]) -> str:
        rng = random.Random(request.seed)
        wrong = request.temperature > 0 and rng.random() < self.error_rate
        return self.task.corrupted(messages, rng) if wrong else self.task.expert(messages)

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        await self.pause("begin")
        assert session_id not in self.sessions
        self.sessions[session_id] = self.task.session(episode)
        self.done.append(("begin", session_id))
        return self.sessions[session_id].messages

    async def step(self, session_id: str, text: str) -> StepResult:
        await self.pause("step")
        return self.sessions[session_id].step(text)

    async def finish(self, session_id: str) -> list[Message]:
        await self.pause("finish")
        return self.sessions.pop(session_id).messages

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.done.append(("asked", state.state_id.rpartition("/")[0]))
        await self.pause("query")
        text = self.task.expert(state.messages)
        said = assistant_message(text, "call")
        return [TeacherAnswer(name, text, said, 0.01, True, 0.1) for name in "ab"[:n]]

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]:
        await self.pause("score")
        return [(-1.0, -2.0)] * len(samples)

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        await self.pause("train")
        assert batch.step == self.trained
        self.trained += 1
        self.done.append(("trained", batch))
        return {"loss/total": 0.0}

    async def sync(self) -> int:
        await self.pause("sync")
        self.served = self.trained
        self.done.append(("served", self.served))
        return self.served

    async def save(self, step: int) -> None:
        await self.pause("save")
        self.done.append(("saved", step))

    def add_traces(self, traces: Sequence[Trace]) -> None:
        if self.broken == "add_traces":
            raise Broken("add_traces")
        self.done += [("stored", trace) for trace in traces]

    def add_pairs(self, pairs: Sequence[PreferencePair]) -> None:
        self.done += [("pair", pair) for pair in pairs]

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        self.done.append(("metrics", dict(metrics)))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.done.append(("measured", evaluation.step))

    def update(self, step: Mapping[str, Any]) -> None:
        self.done.append(("shown", step["step"]))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.done.append(("evaluated", evaluation.step))

    def phase(self, text: str) -> None:
        self.done.append(("phase", text))


MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def make_world(tokenizer: Any, toolbox: ToolboxTask) -> MakeWorld:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda **options: World(toolbox, chat, **options)


def controller_of(world: World, config: Config, late: LateStore) -> Controller:
    rollouts = Rollouts(world, world, world.chat)
    stream: PairStream | None = None
    if config.replay.on:
        stream = make_pair_stream(config, world, world, world.chat, world, late)
    ports = Ports(rollouts, stream, world, world, world, world, world.save)
    return Controller(
        config,
        world.task,
        Batcher(config, world.task, world.chat, make_advantages(config.advantage)),
        ports,
    )


@pytest.fixture(params=[0, 1, 2])
def max_lag(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def config(build_config: Any, max_lag: int) -> Config:
    schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": max_lag}
    return build_config(run={"name": "unit", "seed": 3, "steps": 5}, schedule=schedule, **CHANNELS)


async def finished(world: World, config: Config) -> Controller:
    with new_store() as late:
        controller = controller_of(world, config, late)
        await controller.run()
    return controller


@contextmanager
def new_store() -> Iterator[LateStore]:
    with TemporaryDirectory() as folder, closing(LateStore(Path(folder) / LATE_FILE)) as late:
        yield late


def others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


@pytest.mark.parametrize("seed", range(6))
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
    assert controller.evaluations == [Evaluation(0, 1.0, 4), Evaluation(5, 1.0, 4)]
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
    begun = world.names("begin")
    heldout = [name for name in begun if name.startswith("heldout")]
    assert sorted(heldout) == sorted(2 * [f"heldout-{n:06d}-000" for n in range(4)])
    assert {trace.split for trace in world.names("stored")} == {"train"}


async def test_the_same_seed_makes_the_same_batches_when_synchronous(
    make_world: MakeWorld, build_config: Any
) -> None:
    """The order in which samples get on differs; what a step trains on does not."""
    worlds = [make_world(seed=seed) for seed in (7, 8)]
    for world in worlds:
        await finished(world, build_config(**CHANNELS))
    one, two = (world.names("trained") for world in worlds)
    assert one == two


PORTS = [
    *("begin", "generation", "step", "finish", "query", "score"),
    *("train", "sync", "save", "add_traces"),
]


@pytest.mark.parametrize("port", PORTS)
async def test_a_port_that_fails_ends_the_run_with_its_error_and_leaves_nothing_running(
    make_world: MakeWorld, config: Config, port: str
) -> None:
    world = make_world(seed=9, broken=port)
    with pytest.raises(Broken, match=port):
        await finished(world, config)
    assert others() == set()


async def test_a_run_that_is_cancelled_at_any_moment_leaves_nothing_running(
    make_world: MakeWorld, build_config: Any
) -> None:
    config = build_config(
        **CHANNELS, schedule={"max_lag": 1, "group_size": 2}, eval={"episodes": 1}
    )
    for moment in range(120):
        with new_store() as late:
            running = asyncio.create_task(controller_of(make_world(seed=10), config, late).run())
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


async def test_an_episode_whose_context_is_full_ends_without_success(
    make_world: MakeWorld, toolbox: ToolboxTask
) -> None:
    world = make_world(seed=13)
    rollouts, episode = Rollouts(world, world, world.chat), toolbox.episode("train", 0)
    opening = len(world.chat.first_prompt(toolbox.session(episode).messages))
    trace = await rollouts.run(episode, 0, 0, Sampling(0.0, 64, opening + 64, 0))
    assert len(trace.turns) == 1
    assert (trace.success, trace.reward) == (False, 0.0)
    assert world.sessions == {}


async def test_a_prompt_that_leaves_no_room_for_a_turn_is_refused_with_the_repair(
    make_world: MakeWorld, toolbox: ToolboxTask
) -> None:
    world = make_world(seed=13)
    rollouts, episode = Rollouts(world, world, world.chat), toolbox.episode("train", 0)
    opening = len(world.chat.first_prompt(toolbox.session(episode).messages))
    message = rf"train-000000-000 begins with {opening} tokens .* raise policy\.max_context"
    with pytest.raises(PromptTooLong, match=message):
        await rollouts.run(episode, 0, 0, Sampling(0.0, 64, opening + 63, 0))
