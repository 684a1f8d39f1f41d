"""A run that is stopped at any await, and goes on from its real store: as if it had not been.

The world's processes die with the run, and only the store's files, the trainer's checkpoints and
the teachers' answers stay. The trainer of these tests makes a loss of all that it was ever given,
so that a batch that differs in one number shows in every later step.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from controller_world import CHANNELS, World, controller_of, rollouts_of
from fake_store import Done
from repetition import repeated

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.replay.late_rewards import make_late_rewards
from composer_mesh.services.replay.pair_stream import make_pair_stream
from composer_mesh.services.run.resume_loader import (
    ResumeContents,
    load_resume_state,
    restore_teacher_queries,
    resume_state_of,
)
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.schedule.stopping import Stopping
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import HintWriting
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import GroupState
from composer_mesh.services.store.schema import KIND
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.toolbox import ToolboxTask

STEPS, PROMPTS, EVERY = 4, 2, 3
HINTS = {"writer": "llm", "llm": {"kind": "builtin"}}


class Learning(World):
    """A trainer whose loss is a hash of all its batches; its checkpoints are in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights, self.checkpoints = "", dict[int, str]()
        self.happened: asyncio.Event | None = None
        self.things = 0
        self.post: Callable[[str, float], None] = lambda trace, reward: None

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        await super().train(batch)
        return self.learn(batch)

    def learn(self, batch: StepBatch) -> dict[str, Any]:
        self.weights = hashlib.sha256(f"{self.weights}{batch!r}".encode()).hexdigest()
        return {"loss/total": int(self.weights[:12], 16) / 2**48}

    async def save(self, step: int) -> None:
        await super().save(step)
        self.checkpoints[step] = self.weights

    async def pause(self, port: str, session: str = "") -> None:
        self.things -= 1
        if self.things <= 0 and self.happened is not None:
            self.happened.set()
        await super().pause(port, session)

    def update(self, step: Mapping[str, Any]) -> None:
        super().update(step)
        if step["step"] == 2:
            self.judge()

    def judge(self) -> None:
        """Somebody posts rewards: one for a rollout that is trained, one for none that is known."""
        for trace, reward in (("train-000000-001", 0.625), ("train-000099-000", 1.0)):
            self.post(trace, reward)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        await asyncio.sleep(0)
        return [HintReply(f"Look at it, {len(r.messages)}.", "llm", True, 0.1) for r in requests]


@pytest.fixture(params=[0, 1])
def config(request: pytest.FixtureRequest, build_config: Any) -> Config:
    return build_config(
        run={"name": "unit", "seed": 3, "steps": STEPS},
        schedule={"prompts_per_step": PROMPTS, "group_size": 2, "max_lag": request.param},
        trainer={"checkpoint_every": EVERY},
        eval={"episodes": 2, "every": 2},
        late_rewards={"max_age": 4},
        replay=CHANNELS["replay"],
        sdpo={"alpha": 0.5, "hints": HINTS},
    )


class Life:
    """One process of a run: it begins on what is on disk, and ends with its task."""

    def __init__(self, root: Path, config: Config, tokenizer: Any, task: ToolboxTask) -> None:
        self.root, self.config, self.task = root, config, task
        self.chat = ChatFormat(tokenizer, task.tools)
        self.checkpoints: dict[int, str] = {}
        self.events: list[Done] = []
        self.sampled: list[str] = []
        self.stopping = Stopping()

    async def live(
        self, resumed: bool, seed: int, happened: asyncio.Event | None = None, things: int = 0
    ) -> None:
        """Go on to the end; sets the event when so many things have happened in the world."""
        world, self.stopping = Learning(self.task, self.chat, seed=seed), Stopping()
        world.happened, world.things = happened, things
        world.checkpoints = self.checkpoints
        try:
            with RunStore(self.root, self.config) as store:
                await self._live_on(world, store, resumed)
        finally:
            self.sampled += [what for what in world.names("begin") if what.startswith("train")]

    async def _live_on(self, world: Learning, store: RunStore, resumed: bool) -> None:
        past = ResumeContents()
        if resumed:
            past = await load_resume_state(store, self.config, self._event)
        step = max((c for c in self.checkpoints if c <= past.steps), default=0)
        if step:  # its files are the trainer's business
            again = [one for one in past.again if one[0].step >= step]
            known = [one for one, _ in past.again if one.step < step]
            past = replace(past, checkpoint=Checkpoint(step, Path()), again=again, known=known)
        world.weights, world.trained = self.checkpoints.get(step, ""), past.steps
        world.post = partial(self._post, store)
        if past.steps >= 2:
            world.judge()
        await self._controller(world, store, past).run()

    def _controller(self, world: Learning, store: RunStore, past: ResumeContents) -> Controller:
        config, reader = self.config, store.reading
        advantages = make_advantages(config.advantage)
        late = make_late_rewards(config, reader.rewards, advantages, lambda _: None)
        step_builder = StepBuilder(Batcher(config, world.task, world.chat, advantages, print), late)
        stream = make_pair_stream(config, world, world, world.chat, store, reader.waiting_pairs)
        resume_state = resume_state_of(past, step_builder)
        restore_teacher_queries(past, stream, reader, (past.steps + bool(past.planned)) * PROMPTS)
        for again in resume_state.past:
            assert world.learn(again.batch)["loss/total"] == again.metrics["loss/total"]
        rollouts = rollouts_of(world, config)
        hints = HintWriting(world, config, world.task, world.chat, lambda _: None)
        ports = Ports(rollouts, stream, world, world, store, world, world.save, world.saved, hints)
        heldout = heldout_indices(world.task, config.eval.episodes)
        return Controller(
            config,
            world.task,
            step_builder,
            ports,
            heldout,
            resume_state,
            stopping=self.stopping,
        )

    def _post(self, store: RunStore, trace_id: str, reward: float) -> None:
        if not any(one.trace_id == trace_id for one in store.reading.rewards(None)):
            with (
                closing(SqliteFile(self.root / STORE_FILE, KIND)) as file,
                file.transaction() as rows,
            ):
                insert = "INSERT INTO rewards (trace_id, reward, source, posted) VALUES "
                rows.execute(f"{insert} (?, ?, '', 0)", (trace_id, reward))

    def _event(self, kind: str, actor: str, detail: str, /, **_: Any) -> None:
        self.events.append((kind, detail))

    def metrics(self) -> list[dict[str, Any]]:
        with RunReader(self.root) as reader:
            found = [row.metrics or {} for row in reader.steps()]
        return [{k: v for k, v in step.items() if not timing(k)} for step in found]


def timing(key: str) -> bool:
    return key.startswith(("time/", "store/", "generator/")) or key == "weights/hidden_share"


async def at(moment: tuple[int, int], life: Life, resumed: bool, seed: int) -> asyncio.Task[None]:
    """The run, after so many turns of the loop when so many things had happened in its world."""
    things, turns = moment
    running = asyncio.create_task(life.live(resumed, seed, happened := asyncio.Event(), things))
    ahead = asyncio.create_task(happened.wait())
    await asyncio.wait([running, ahead], return_when=asyncio.FIRST_COMPLETED)
    ahead.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    return running


async def stopped_after(moment: tuple[int, int], life: Life, resumed: bool, seed: int) -> bool:
    """Whether the run came to its end before it was cancelled."""
    running = await at(moment, life, resumed, seed)
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        return False
    return True


async def asked_after(moment: tuple[int, int], life: Life, resumed: bool, seed: int) -> bool:
    """Whether the run came to its end although it was asked to stop."""
    running = await at(moment, life, resumed, seed)
    life.stopping.cancels(running)
    life.stopping.ask()
    try:
        await running
    except asyncio.CancelledError:
        return False  # before anybody could heed it
    return not life.stopping.stopped


@pytest.fixture
def make_life(tmp_path: Path, config: Config, tokenizer: Any, toolbox: ToolboxTask) -> Any:
    return lambda name: Life(tmp_path / name, config, tokenizer, toolbox)


def a_moment(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(30), rng.randrange(200)


@pytest.mark.parametrize("seed", repeated(range(3)))
async def test_a_run_that_is_stopped_again_and_again_is_the_undisturbed_run(
    make_life: Any, config: Config, seed: int
) -> None:
    rng = random.Random(seed)
    whole = make_life("whole")
    await whole.live(resumed=False, seed=1)
    life, lives = make_life("stopped"), 0
    while not await stopped_after(a_moment(rng), life, lives > 0, seed=1):
        lives += 1
        assert lives < 400, life.metrics()
    assert lives > 2
    with RunReader(life.root) as reader:
        trained = reader.groups(GroupState.TRAINED)
        assert [row.group_id for row in trained] == list(range(STEPS * PROMPTS))
        assert [row.trained for row in trained] == [n // PROMPTS + 1 for n in range(len(trained))]
        assert [row.step for row in reader.steps(superseded=True)] == list(range(STEPS))
    assert [one["step"] for one in life.metrics()] == [1, 2, 3, 4]
    assert sum(one["late/rewards"] for one in life.metrics()) == 1
    if config.schedule.max_lag == 0:
        assert life.metrics() == whole.metrics()


async def test_no_group_that_was_finished_is_sampled_again_where_rollouts_run_ahead(
    make_life: Any, config: Config
) -> None:
    life = make_life("run")
    await stopped_after((120, 0), life, resumed=False, seed=2)
    with RunReader(life.root) as reader:
        finished = {row.group_id for row in reader.groups() if row.state != GroupState.IN_FLIGHT}
    assert finished
    life.sampled.clear()
    await life.live(resumed=True, seed=2)
    again = {int(name.split("-")[1]) for name in life.sampled}
    assert again | finished == set(range(STEPS * PROMPTS))
    if config.schedule.max_lag:
        assert not again & finished


@pytest.mark.parametrize("seed", repeated(range(3)))
async def test_a_run_that_is_asked_to_stop_has_a_checkpoint_of_its_last_step_and_goes_on_as_if_not(
    make_life: Any, config: Config, seed: int
) -> None:
    rng = random.Random(seed)
    whole = make_life("whole")
    await whole.live(resumed=False, seed=1)
    life, lives = make_life("asked"), 0
    while not await asked_after(a_moment(rng), life, lives > 0, seed=1):
        lives += 1
        assert lives < 400, life.metrics()
        steps = len(life.metrics())
        assert max(life.checkpoints, default=0) == steps
        assert not any(name == "run_caught_up" for name, _ in life.events)
    assert lives > 0
    assert [one["step"] for one in life.metrics()] == [1, 2, 3, 4]
    if config.schedule.max_lag == 0:
        assert life.metrics() == whole.metrics()


class Hanging(World):
    """Whose generation hangs when the first step is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hanging, self.stuck = 0, asyncio.Event()

    async def pause(self, port: str, session: str = "") -> None:
        self.hanging += port == self.hang
        if self.hanging == 2 * PROMPTS:  # all rollouts of a step
            self.stuck.set()
        await super().pause(port, session)

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        metrics = await super().train(batch)
        self.hang = "generation"
        return metrics

    async def save(self, step: int) -> None:
        for _ in range(100):  # a disk is slow
            await asyncio.sleep(0)
        await super().save(step)

    def abandon(self, session_id: str) -> None:
        super().abandon(session_id)
        self.done.append(("abandoned", session_id))


async def test_rollouts_that_are_sampled_together_stay_together_until_the_checkpoint_is_written(
    config: Config, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    """One that left its batch would change the last digits of the others, which are stored."""
    world = Hanging(toolbox, ChatFormat(tokenizer, toolbox.tools), seed=1)
    controller = controller_of(world, config)
    running = asyncio.create_task(controller.run())
    await asyncio.wait_for(world.stuck.wait(), 60)
    assert controller.stopping.ask()
    await running
    kinds = [kind for kind, _ in world.done]
    assert kinds.count("abandoned") >= PROMPTS
    assert kinds.index("saved") < kinds.index("abandoned")
    assert world.names("saved")[-1] == controller.step >= 1
