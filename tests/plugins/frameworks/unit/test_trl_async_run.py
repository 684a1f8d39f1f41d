"""The run behind TRL's AsyncGRPOTrainer: groups enter while there is room, weights reach all."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from controller_world import World, rollouts_of
from fake_store import Broken

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.plugins.frameworks.trl.async_run import MeshThread, WeightSender, next_group
from composer_mesh.plugins.frameworks.trl.async_stream import (
    MeshFailed,
    OlderWeights,
    RolloutBuffer,
    SampleQueues,
    SampleStream,
)
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.episodes.rollout import RolloutsFail
from composer_mesh.services.run.assembly import FAILED
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.service import Service
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.step import StaleReceiver
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
GROUP, MOST, LIMIT_S = 3, 12, 60.0


class Playing:
    """A stream on rollouts of the real task; groups enter when samples are taken, as in a mesh."""

    def __init__(self, config: Config, world: World, now: Callable[[], float] = lambda: 0.0):
        self.buffer = RolloutBuffer(2, lambda: self.stream.admit())
        self.figures: queue.Queue[Any] = queue.Queue()
        rollouts = rollouts_of(world, config)
        self.groups = Groups(config, world.task, rollouts, world, None, None, {})
        queues = SampleQueues(self.buffer, self.figures, MOST)
        restarts = iter(range(10_000)).__next__
        rest = (queues, 7, restarts, now)
        self.stream = SampleStream(config, self.groups, rollouts.retries, *rest)

    async def __aenter__(self) -> Playing:
        self.running = asyncio.ensure_future(self.stream.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait([self.running])
        await self.groups.close()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not reached() and not self.running.done():  # noqa: ASYNC110  no event tells it
                await asyncio.sleep(0)
        if self.running.done():
            self.running.result()


@pytest.fixture
def config(request: pytest.FixtureRequest, build_config: Any) -> Config:
    schedule = {"prompts_per_step": 2, "group_size": GROUP, "max_lag": 2}
    return cast(Config, build_config(schedule=schedule | getattr(request, "param", {})))


@pytest.fixture
def world(toolbox: ToolboxTask, tokenizer: Any) -> World:
    return World(toolbox, ChatFormat(tokenizer, toolbox.tools), seed=1, newest=3, served=3)


async def test_groups_enter_while_there_is_room_for_them_and_come_in_the_order_of_entry(
    config: Config, world: World
) -> None:
    async with Playing(config, world) as playing:
        assert playing.stream.next_group == 7
        playing.stream.version = 3
        playing.stream.open()
        assert world.names("entered") == [7, 8, 9, 10]
        await playing.until(lambda: playing.buffer.qsize() == MOST)
        assert playing.stream.unfinished == 0
        found = [playing.buffer.get_nowait() for _ in range(2)]
        assert world.names("entered") == [7, 8, 9, 10]
        found += [playing.buffer.get_nowait() for _ in range(GROUP)]
        assert world.names("entered") == [7, 8, 9, 10, 11]
        await playing.until(lambda: playing.buffer.qsize() == MOST - 2)
        found += [playing.buffer.get_nowait() for _ in range(MOST - 2)]
    assert [one.group_id for one in found] == [n for n in range(7, 12) for _ in range(GROUP)]
    assert {one.model_version for one in found} == {3}
    figures = playing.figures.get_nowait()
    assert figures["rollout/restarts_total"] == 0
    assert figures["rollout/generated_tok_s"][0] > 0
    assert playing.figures.get_nowait()["rollout/restarts_total"] == 1


async def test_while_weights_are_sent_no_group_enters(config: Config, world: World) -> None:
    async with Playing(config, world) as playing:
        playing.stream.admit()
        assert not world.names("entered")
        playing.stream.open()
        await playing.until(lambda: playing.buffer.qsize() == MOST)
        playing.stream.pause()
        for _ in range(MOST):
            playing.buffer.get_nowait()
        assert len(world.names("entered")) == 4
        playing.stream.open()
        assert len(world.names("entered")) == 8


@pytest.mark.parametrize("config", [{"dynamic_sampling": True}], indirect=True)
async def test_dynamic_sampling_hands_over_no_group_with_equal_rewards(
    config: Config, world: World
) -> None:
    world.error_rate = 0.0
    async with Playing(config, world) as playing:
        playing.stream.open()
        await playing.until(lambda: playing.figures.qsize() == 5)
        playing.stream.pause()
    assert playing.buffer.qsize() == 0
    assert playing.figures.get_nowait()["rollout/dropped_equal_total"] == 1
    assert world.groups


async def test_where_no_episode_can_be_played_the_stream_ends_with_the_cause(
    config: Config, world: World
) -> None:
    def always(_world: World, port: str, _session: str) -> None:
        raise Broken(port)

    world.faults = always
    async with Playing(config, world) as playing:
        playing.stream.open()
        with pytest.raises(RolloutsFail, match=r"less than half .* the last failure was Broken"):
            await playing.until(lambda: False)


async def test_tokens_of_weights_that_were_replaced_end_the_stream(
    config: Config, world: World
) -> None:
    async with Playing(config, world) as playing:
        playing.stream.version = 4
        playing.stream.open()
        with pytest.raises(OlderWeights, match=r"group 7 entered .* version 4 .* of version 3"):
            await playing.until(lambda: False)
    assert playing.buffer.qsize() == 0


async def test_once_closed_no_group_enters_whoever_takes_samples(
    config: Config, world: World
) -> None:
    async with Playing(config, world) as playing:
        playing.stream.open()
        await playing.until(lambda: playing.buffer.qsize() == MOST)
        playing.stream.close()
        playing.stream.open()
        playing.buffer.get_nowait()
        for _ in range(MOST - 1):
            playing.buffer.get_nowait()
        assert len(world.names("entered")) == 4


async def test_a_training_that_resumes_plays_no_episode_again(
    config: Config, tmp_path: Path
) -> None:
    with RunStore(tmp_path / "run", config) as store:
        assert next_group(store.reading) == 0
        for group_id in (0, 1, 4):
            store.enter(group_id, 1)
        await store.add_group(1, [])
    with RunStore(tmp_path / "run", config) as store:
        assert next_group(store.reading) == 5


async def test_a_stream_without_a_finished_group_for_too_long_is_no_longer_healthy(
    config: Config, world: World
) -> None:
    now = [0.0]
    async with Playing(config, world, lambda: now[0]) as playing:
        now[0] = 500.0
        playing.stream.check(300.0)  # nothing may enter yet
        playing.stream.open()
        now[0] = 800.0
        playing.stream.check(300.0)
        now[0] = 801.0
        with pytest.raises(MeshFailed, match=r"for 301 s, but heartbeat_stale_after_s is 300"):
            playing.stream.check(300.0)
        await playing.until(lambda: playing.buffer.qsize() == MOST)
        playing.stream.check(300.0)
        now[0] = 9000.0  # the trainer has taken nothing all the time, and now takes all
        for _ in range(MOST):
            playing.buffer.get_nowait()
        playing.stream.check(300.0)


class Generators:
    """A pool of generators that pulls what it is told, and serves `served` versions later."""

    def __init__(self, served: int = 0) -> None:
        self.pulled: list[Any] = []
        self.served = served

    async def setup(self, endpoint: str, handle: Any) -> list[int]:
        assert endpoint == "pull"
        staged = await WeightReceiver().receive(handle)
        self.pulled.append({name: one.clone() for names, one in staged.tensors() for name in names})
        return [handle.version + self.served] * 2


async def test_generators_get_the_tensors_that_were_sent_under_all_their_names(
    config: Config,
) -> None:
    generators = Generators()
    sender = WeightSender(config, cast(Service, generators))
    for version in (1, 2):
        tied = torch.full((2, 3), float(version))
        await sender.send({"embed": tied, "head": tied, "norm": torch.ones(3)}, version)
    await sender.close()
    first, second = generators.pulled
    assert first.keys() == {"embed", "head", "norm"}
    assert torch.equal(second["head"], torch.full((2, 3), 2.0))
    assert torch.equal(second["embed"], second["head"])


async def test_a_generator_that_serves_another_version_ends_the_sync(config: Config) -> None:
    sender = WeightSender(config, cast(Service, Generators(served=-1)))
    with pytest.raises(StaleReceiver, match=r"published version 4 but receivers serve \[3, 3\]"):
        await sender.send({"norm": torch.ones(3)}, 4)
    await sender.close()


class FakeRun:
    """A run that becomes ready and fails when a test says so."""

    def __init__(self, *_: Any, queues: SampleQueues) -> None:
        self.ready, self._end = asyncio.Event(), asyncio.Event()
        self.failure, self.stream = "", cast(SampleStream, self)
        self.loop: asyncio.AbstractEventLoop
        self.lives = threading.Event()
        self.checked: list[float] = []

    async def live(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.lives.set()
        await self._end.wait()
        return FAILED if self.failure else 0

    def finish(self) -> None:
        self._end.set()

    def settled(self, code: int) -> int:
        return code

    def check(self, stale_after_s: float) -> None:
        self.checked.append(stale_after_s)

    def now(self, function: Callable[[], object]) -> None:
        """Call a function on the loop; returns when it has returned."""
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.loop.call_soon_threadsafe(call)
        assert done.wait(LIMIT_S)

    def fail(self) -> None:
        self.failure = "generator-0 died: Killed(sig=9)"
        self._end.set()


@pytest.fixture
def fake(config: Config, tmp_path: Path) -> tuple[MeshThread, FakeRun]:
    runs: list[FakeRun] = []

    def make(*args: Any, **options: Any) -> Any:
        runs.append(FakeRun(*args, **options))
        return runs[0]

    queues = SampleQueues(RolloutBuffer(2, lambda: None), queue.Queue(), MOST)
    mesh = MeshThread(config, tmp_path / "rollouts", queues, make)
    assert runs[0].lives.wait(LIMIT_S)
    return mesh, runs[0]


def test_a_mesh_that_fails_while_it_starts_raises_the_cause_once(
    fake: tuple[MeshThread, FakeRun],
) -> None:
    mesh, run = fake
    run.now(run.fail)
    with pytest.raises(MeshFailed, match=r"has ended: generator-0 died: Killed"):
        mesh.wait_until_ready()
    mesh.close()


def test_a_mesh_that_fails_later_is_no_longer_healthy(fake: tuple[MeshThread, FakeRun]) -> None:
    mesh, run = fake
    run.now(run.ready.set)
    mesh.wait_until_ready()
    mesh.check(5.0)
    assert run.checked == [5.0]
    run.now(run.fail)
    run.now(lambda: None)  # the loop has run what the failure has woken
    with pytest.raises(MeshFailed, match="generator-0 died"):
        mesh.send({}, 2)
    with pytest.raises(MeshFailed, match="generator-0 died"):
        mesh.check(5.0)
    mesh.close()


def test_a_failure_that_nobody_was_told_of_is_raised_at_the_end(
    fake: tuple[MeshThread, FakeRun],
) -> None:
    mesh, run = fake
    run.now(run.ready.set)
    run.now(run.fail)
    with pytest.raises(MeshFailed, match="generator-0 died"):
        mesh.close()


def test_a_mesh_that_still_starts_is_cancelled_and_its_directory_is_free_again(
    fake: tuple[MeshThread, FakeRun], config: Config, tmp_path: Path
) -> None:
    mesh, _ = fake
    mesh.close()
    queues = SampleQueues(RolloutBuffer(2, lambda: None), queue.Queue(), MOST)
    again = MeshThread(config, tmp_path / "rollouts", queues, cast(Any, FakeRun))
    again.close()
