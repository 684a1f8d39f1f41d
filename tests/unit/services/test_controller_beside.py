"""The controller where weights travel beside the next step: what overlaps, waits, and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from controller_world import World, finished, others
from fake_store import Broken
from repetition import crossed, repeated
from simulated_time import SimulatedLoop

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.tasks.toolbox import ToolboxTask

T = TypeVar("T")
STEPS = 6
TAKES = {"train": 10.0, "publish": 0.1, "sync": 3.0, "pull": 0.9}
SYNC_S = 4.0
"""What the parts of a sync take together."""


@dataclass
class TimedWorld(World):
    """A world whose ports take simulated time, and whose n-th sync may fail."""

    takes: dict[str, float] = field(default_factory=lambda: dict(TAKES))
    slow_from: int = 10**6
    """The first group whose rollouts take long to finish."""
    fails_at: int = 0
    failed_s: float = 0.0
    syncs: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def pause(self, port: str, session: str = "") -> None:
        try:
            await asyncio.sleep(self._takes(port, session))
        except asyncio.CancelledError:
            self.cancelled.append(port)
            raise
        await super().pause(port, session)
        if port == "pull" and self.syncs == self.fails_at:
            self.failed_s = asyncio.get_running_loop().time()
            raise Broken(f"sync {self.syncs}")

    def _takes(self, port: str, session: str) -> float:
        slow = session.startswith("train") and int(session.split("-")[1]) >= self.slow_from
        return 500.0 if slow and port == "finish" else self.takes.get(port, 0.0)

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        self.syncs += 1
        return await super().sync(on_snapshot)


MakeTimedWorld = Callable[..., TimedWorld]


@pytest.fixture(scope="module")
def make_world(tokenizer: Any, toolbox: ToolboxTask) -> MakeTimedWorld:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda **options: TimedWorld(toolbox, chat, **options)


@pytest.fixture
def build(build_config: Any) -> Any:
    def config(max_lag: int, checkpoint_every: int = 0, every: int = 0) -> Config:
        return build_config(
            run={"name": "unit", "seed": 3, "steps": STEPS},
            schedule={"prompts_per_step": 2, "group_size": 3, "max_lag": max_lag},
            trainer={"checkpoint_every": checkpoint_every},
            logprob_mismatch={"all_tokens": True},
            eval={"episodes": 2, "every": every},
        )

    return config


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run it in simulated time, where waiting for nothing is an error and not a hanging test."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


def column(world: World, key: str) -> list[Any]:
    return [metrics[key] for metrics in world.names("metrics")]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_weights_travel_beside_the_next_step_and_hold_it_up_for_their_beginning_only(
    make_world: MakeTimedWorld, build: Any, max_lag: int
) -> None:
    world = make_world()
    simulated(finished(world, build(max_lag)))
    exposed, took = column(world, "time/weight_sync_s"), column(world, "time/weight_sync_total_s")
    assert exposed == pytest.approx([0, *[TAKES["publish"]] * (STEPS - 2), 0.1 + SYNC_S])
    assert took == pytest.approx([0, *[SYNC_S] * (STEPS - 2), 2 * SYNC_S])
    shares = column(world, "weights/hidden_share")
    assert shares[0] is None
    assert min(shares[1:-1]) >= 0.9
    steps = column(world, "time/step_s")
    assert steps[1:-1] == pytest.approx([TAKES["train"] + TAKES["publish"]] * (STEPS - 2))
    assert column(world, "time/train_s") == pytest.approx([TAKES["train"]] * STEPS)


def test_what_a_step_waits_until_it_may_be_trained_is_the_syncs_time_and_not_its_own(
    make_world: MakeTimedWorld, build: Any
) -> None:
    world = make_world(takes={**TAKES, "publish": 2.5})
    simulated(finished(world, build(1)))
    assert column(world, "time/weight_sync_s")[1:-1] == pytest.approx([2.5] * (STEPS - 2))
    assert column(world, "time/wait_batch_s")[1:-1] == pytest.approx([0.0] * (STEPS - 2))
    assert column(world, "time/train_s") == pytest.approx([TAKES["train"]] * STEPS)


def test_where_no_rollout_may_lag_nothing_runs_beside_anything(
    make_world: MakeTimedWorld, build: Any
) -> None:
    world = make_world(takes={**TAKES, "generation": 0.01})
    simulated(finished(world, build(0)))
    kinds = ("training", "trained", "served", "metrics")
    order = [kind for kind, _ in world.done if kind in kinds]
    assert order == list(kinds) * STEPS
    assert column(world, "weights/hidden_share") == [0.0] * STEPS
    assert column(world, "time/weight_sync_s") == pytest.approx([SYNC_S] * STEPS)


@pytest.mark.parametrize("max_lag", [1, 2])
def test_steps_are_trained_while_a_version_is_on_its_way(
    make_world: MakeTimedWorld, build: Any, max_lag: int
) -> None:
    world = make_world()
    simulated(finished(world, build(max_lag)))
    order = [(kind, what) for kind, what in world.done if kind in ("training", "served")]
    for step in range(1, STEPS):
        assert order.index(("training", step)) < order.index(("served", step))


@pytest.mark.parametrize(
    ("slow", "max_lag"), crossed(["train", "sync", "generation", "finish"], [1, 2])
)
def test_whatever_is_slow_no_token_is_older_than_the_bound_and_every_group_is_trained_once(
    make_world: MakeTimedWorld, build: Any, max_lag: int, slow: str
) -> None:
    world = make_world(seed=max_lag, takes={**TAKES, slow: 40.0})
    simulated(finished(world, build(max_lag)))
    taken = [sample.trace_id for batch in world.names("trained") for sample in batch.samples]
    assert taken == [f"train-{g:06d}-{n:03d}" for g in range(2 * STEPS) for n in range(3)]
    assert max(column(world, "lag/max")) <= max_lag
    assert world.names("served") == list(range(1, STEPS + 1))


def test_groups_enter_at_once_when_a_version_has_come_and_not_at_the_next_step(
    make_world: MakeTimedWorld, build: Any
) -> None:
    world = make_world(takes={**TAKES, "train": 100.0})
    simulated(finished(world, build(1)))
    kinds = [(kind, what) for kind, what in world.done if kind in ("served", "begin", "trained")]
    trained = [place for place, (kind, _) in enumerate(kinds) if kind == "trained"]
    between = kinds[trained[0] + 1 : trained[1]]
    assert between[0] == ("served", 1)
    assert {what for kind, what in between if kind == "begin"} == {
        f"train-{group:06d}-{n:03d}" for group in (4, 5) for n in range(3)
    }


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_evaluations_and_checkpoints_wait_until_their_version_is_served(
    make_world: MakeTimedWorld, build: Any, max_lag: int
) -> None:
    world = make_world()
    simulated(finished(world, build(max_lag, checkpoint_every=2, every=3)))
    served = trained = 0
    for kind, what in world.done:
        if kind == "served":
            served = what
        elif kind == "trained":
            trained += 1
        elif kind == "saved":
            assert served == trained == what
        elif kind == "begin" and what.startswith("heldout"):
            assert served == trained
    assert world.names("saved") == [2, 4, 6]
    assert world.names("measured") == [0, 3, 6]


@pytest.mark.parametrize("beside", ["train", "finish"])
@pytest.mark.parametrize("fails_at", [1, 3, STEPS])
def test_a_sync_that_fails_ends_the_run_with_its_cause_at_once_whatever_is_under_way(
    make_world: MakeTimedWorld, build: Any, fails_at: int, beside: str
) -> None:
    """Where training is slow it is cancelled, and where rollouts are slow nobody waits for them."""
    world = make_world(fails_at=fails_at)
    if beside == "train":
        world.takes["train"] = 500.0
    else:
        world.slow_from = 2 * fails_at

    async def run() -> float:
        with pytest.raises(Broken, match=f"sync {fails_at}"):
            await finished(world, build(1))
        assert others() == set()
        return asyncio.get_running_loop().time()

    assert simulated(run()) == world.failed_s
    assert world.trained == fails_at
    if fails_at < STEPS:
        assert beside in world.cancelled


def test_a_step_that_fails_beside_a_sync_leaves_no_sync_under_way(
    make_world: MakeTimedWorld, build: Any
) -> None:
    world = make_world(takes={**TAKES, "sync": 500.0})

    async def run() -> None:
        running = asyncio.create_task(finished(world, build(1)))
        await asyncio.sleep(TAKES["train"] + 1)
        assert world.names("training") == [0, 1]
        world.broken = "train"
        with pytest.raises(Broken, match="train"):
            await running
        assert others() == set()

    simulated(run())
    assert (world.under_way, world.cancelled) == (0, ["sync"])


@pytest.mark.parametrize("max_lag", repeated([1, 0]))
def test_a_run_that_is_cancelled_at_any_moment_leaves_no_sync_under_way(
    make_world: MakeTimedWorld, build: Any, max_lag: int
) -> None:
    async def run(moment: float) -> None:
        world = make_world()
        running = asyncio.create_task(finished(world, build(max_lag)))
        await asyncio.sleep(moment)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert others() == set(), moment
        assert world.under_way == 0

    for moment in (0.05, 9, 10.05, 11, 13.5, 20.15, 24.05, 31, 40.25, 61):
        simulated(run(moment))
