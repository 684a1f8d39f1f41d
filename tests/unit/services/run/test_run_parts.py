"""What a run hands to its parts: what was before a resume, its own stop, and the ranks of now.

The order of a run's episodes: made from its config, task and what it has stored.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_host import FakeHost
from fake_pool import Pool
from fake_teachers import weights
from repository import ROOT

from composer_mesh import Row, Task
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.heartbeat import Busy
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.curriculum import Curriculum, EpisodeOrder, GroupResult
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.hints import hint_templates
from composer_mesh.rollouts.tasks import PoisonedInput
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.pool.process_placement import ProcessPlacements
from composer_mesh.services.run.assembly import TrainingRun
from composer_mesh.services.run.parts import RunParts, make_episode_order
from composer_mesh.services.run.pools import Pools
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.services.schedule.groups import StoredGroup
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.traces.listing import stored_templates
from composer_mesh.tasks.errors import TaskCodeError
from composer_mesh.tasks.toolbox import ToolboxTask


@dataclass
class Rank:
    """Publishes one version."""

    version: int

    async def call(self, endpoint: str, deadline_s: float) -> Any:
        assert endpoint == "publish"
        return weights(self.version)


class Ranks:
    """Ranks that never die."""

    def __init__(self, *ranks: Rank) -> None:
        self.all = list(ranks)

    async def guard(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def until_one_dies(self) -> None:
        await asyncio.Event().wait()


class Generators(Pool):
    """Pull at once what is published."""

    async def broadcast_weights(self, trainer: Rank, endpoint: str, handle: Any) -> list[int]:
        return [handle.version]


class Mesh(SimpleNamespace):
    """A loaded mesh without rollout workers."""

    def __init__(self, *ranks: Rank) -> None:
        none = dict.fromkeys(("teachers", "replay", "reference", "judges", "turns"))
        pools = {"generators": Generators([]), "environments": Pool([]), "rollouts": Pool([])}
        super().__init__(trainers=Ranks(*ranks), hints=None, **pools, **none)

    async def load(self, *_: Any) -> None:
        pass

    async def take_activity(self) -> list[Busy]:
        return []


def parts_of(store: RunStore, config: Config, task: ToolboxTask, *ranks: Rank) -> RunParts:
    mesh: Any = Mesh(*ranks)
    chat: Any = None
    return RunParts(config, store, mesh, task, chat, lambda *_, **__: None)


async def test_what_was_set_aside_is_not_played_after_a_resume(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    config, bad = build_config(), toolbox.pick("train", 7)
    with RunStore(tmp_path, config) as store:
        store.add_poisoned(PoisonedInput(bad, "task", "KeyError", "", 3))
        store.finish()
        past = ResumeContents(poisoned=store.reading.poisoned())
        rollouts = parts_of(store, config, toolbox).rollouts(past)
        assert rollouts.retries.is_set_aside(bad)
        (played,) = rollouts.start(bad, 0, 1, Sampling.training(config))
        assert await played is None
        assert not rollouts.retries.is_set_aside(replace(bad, index=8))
        await rollouts.close()


@pytest.mark.parametrize(("max_lag", "together"), [(0, True), (1, False)])
async def test_rollouts_take_their_turns_together_where_no_lag_is_allowed(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask, max_lag: int, together: bool
) -> None:
    config = build_config(schedule={"max_lag": max_lag})
    with RunStore(tmp_path, config) as store:
        rollouts = parts_of(store, config, toolbox).rollouts(ResumeContents())
        workers: Any = rollouts._player
        assert (workers._rounds is not None) == together
        await rollouts.close()


async def test_weights_are_those_of_the_ranks_that_live_now(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    config = build_config()
    with RunStore(tmp_path, config) as store:
        parts = parts_of(store, config, toolbox, Rank(1))
        trainer = parts.trainer(None)
        ranks: Any = parts.mesh.trainers
        ranks.all = [Rank(2)]
        assert await trainer.sync() == 2


class StoppingView:
    """Requests a stop as training begins; `finishes_step` is whether training ends first."""

    def __init__(self) -> None:
        self.run: TrainingRun | None = None
        self.finishes_step: bool | None = None

    def phase(self, text: str) -> None:
        if text == "training" and self.run is not None:
            self.finishes_step = self.run.stopping.ask()
            assert self.finishes_step  # nothing else would end this run


async def stopped(root: Path, config: Config, task: ToolboxTask, past: ResumeContents) -> Any:
    """A run that resumed from `past` and was requested to stop when training began."""
    view, mesh = StoppingView(), Mesh()
    chat = SimpleNamespace(content_tokens=lambda text: [])
    evaluated = replace(past, evaluations=[Evaluation(0, 0.5, 4)])
    with RunStore(root, config) as store:
        run: Any = TrainingRun(config, store, cast(RunView, view))
        view.run, run._past = run, evaluated
        await run._train_from(mesh, root, task, chat, [0])
    return SimpleNamespace(run=run, finishes_step=view.finishes_step)


async def test_training_heeds_the_stop_of_its_run(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    ended = await stopped(tmp_path, build_config(), toolbox, ResumeContents())
    assert (ended.finishes_step, ended.run.stopping.stopped) == (True, True)


class Shown:
    """What a run shows: events and warnings."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def event(self, text: str) -> None:
        self.lines.append(("event", text))

    def warning(self, text: str) -> None:
        self.lines.append(("warning", text))


async def test_a_run_shows_warnings_apart_and_stores_the_templates_that_it_uses(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    view = Shown()
    config = build_config(sdpo={"alpha": 0.1, "hints": {"templates": {"own": "Look at {item}."}}})
    with RunStore(tmp_path, config) as store:
        run: Any = TrainingRun(config, store, cast(RunView, view))
        run.event("groups_flat", "", "policy: flat")
        run.event("checkpoint", "trainer", "step-1")
        await run._keep_hint_templates(toolbox)
    assert view.lines == [
        ("warning", "groups_flat policy: flat"),
        ("event", "checkpoint trainer step-1"),
    ]
    stored = stored_templates(tmp_path)
    assert stored == hint_templates(toolbox.hint_templates, {"own": "Look at {item}."})


async def test_a_query_whose_teacher_is_killed_is_made_again_on_another() -> None:
    config, host = (
        load_config(ROOT / "configs" / "quickstart.toml", ["replay.actors=2"]),
        FakeHost(),
    )
    deaths = [ActorDied("teacher_replay-0", "killed")]

    def answer(endpoint: str, _: tuple[Any, ...]) -> Any:
        if endpoint == "query" and deaths:
            raise deaths.pop()
        return endpoint

    host.answer = answer
    placements = ProcessPlacements.of(config)
    pools = Pools(config, cast(MeshHost, host), placements, lambda *_, **__: None)
    async with await pools.teachers() as teachers:
        assert (await teachers.query("state", 1), deaths) == ("query", [])


BAND: dict[str, Any] = {"curriculum": {"low": 0.4, "high": 0.6, "explore": 1e-9}}


class Rows(Task):
    """A task of three rows."""

    def rows(self, split: Split) -> list[Row] | None:
        return [{"n": n} for n in range(3)]


class Faulty(Task):
    def rows(self, split: Split) -> list[Row] | None:
        raise KeyError("mine")


class Made(Task):
    def generate(self, rng: random.Random) -> Row:
        return {"n": rng.random()}


def stored(group_id: int, episode: int) -> StoredGroup:
    trace = Trace("a", group_id, 0, "rows", "train", episode, [], [], 0.0, False, [])
    return StoredGroup([trace])


def test_without_a_curriculum_episodes_are_played_in_order(build_config: Any) -> None:
    assert type(make_episode_order(build_config(), Faulty(), ResumeContents())) is EpisodeOrder


def test_a_run_goes_on_with_what_its_steps_have_measured_and_its_waiting_groups_play(
    build_config: Any,
) -> None:
    results = (GroupResult(0, 0, 0, 2), GroupResult(1, 1, 1, 2))
    past = ResumeContents(steps=1, results=[(0, results)], waiting={3: stored(3, 2)})
    order = make_episode_order(build_config(data=BAND), Made(), past)
    assert isinstance(order, Curriculum)
    # Episode 1 is in the band, 2 is that of a stored group, and 3 is the next new one.
    assert [order.choose(group, 1) for group in (2, 3, 4)] == [1, 2, 3]


def test_the_rows_of_a_finite_task_are_counted(build_config: Any) -> None:
    results = tuple(GroupResult(n, n, 1 if n == 4 else 0, 2) for n in range(5))
    past = ResumeContents(steps=1, results=[(0, results)])
    order = make_episode_order(build_config(data=BAND), Rows(), past)
    assert order.figures(results)["curriculum/episodes"] == 3
    assert order.choose(5, 1) == 4


def test_rows_that_raise_are_an_error_with_the_line(build_config: Any) -> None:
    with pytest.raises(TaskCodeError, match=r"test_run_parts\.py:\d+: KeyError: 'mine'"):
        make_episode_order(build_config(data=BAND), Faulty(), ResumeContents())


def test_islands_with_a_curriculum_start_from_different_episodes(build_config: Any) -> None:
    orders = [
        make_episode_order(
            build_config(
                data=BAND, islands={"store": "file:///shared/x", "rank": rank, "world_size": 2}
            ),
            Made(),
            ResumeContents(),
        )
        for rank in range(2)
    ]
    assert [[order.choose(group, 0) for group in range(3)] for order in orders] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
