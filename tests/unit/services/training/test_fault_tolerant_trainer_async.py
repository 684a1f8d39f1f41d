"""A trainer that serves a version while it trains the next one, and loses its ranks meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from controller_world import others
from fake_trainer import Running, batch
from slow_trainer import Beside

from composer_mesh.mesh.supervision import ActorDied

STEPS = 12
SEEDS = range(24)
MANY = {"supervision": {"trainer_restarts": 50}}


def check(run: Beside) -> None:
    """What holds however often ranks died: each fault handled once, versions in order."""
    assert run.trainer.restarts == run.slow.kills >= len(run.told())
    for versions in ([version for version, _ in run.slow.served], run.versions):
        assert versions == sorted(versions)
        assert versions[-1] == STEPS
    assert len(set(run.slow.served)) == len(dict(run.slow.served))  # a version has one weight
    assert others() == set()


async def undisturbed(build_config: Any, root: Path) -> float:
    run = Running(build_config, root / "undisturbed")
    await run.steps(0, STEPS)
    return run.world.weight


async def test_steps_are_trained_beside_syncs_and_come_to_the_same_weights(
    build_config: Any, tmp_path: Path
) -> None:
    for seed in (0, 1):
        run = Beside(build_config, tmp_path / str(seed), seed)
        await run.run(STEPS)
        check(run)
        assert run.versions == list(range(1, STEPS + 1))
        assert run.slow.weight == await undisturbed(build_config, tmp_path / str(seed))
        assert run.slow.beside > 0


@pytest.mark.parametrize("seed", SEEDS)
async def test_ranks_that_die_at_any_moments_lead_to_the_weights_of_the_undisturbed_run(
    build_config: Any, tmp_path: Path, seed: int
) -> None:
    run = Beside(build_config, tmp_path, seed, **MANY)
    rng = random.Random(seed)
    await run.run_and_strike(STEPS, [rng.randrange(40) for _ in range(rng.randrange(1, 7))])
    check(run)
    assert run.slow.weight == await undisturbed(build_config, tmp_path)


async def test_deaths_meet_a_step_a_sync_both_and_neither(
    build_config: Any, tmp_path: Path
) -> None:
    """So that the test before this one is about all four."""
    met = set()
    for seed in SEEDS:
        run = Beside(build_config, tmp_path / str(seed), seed, **MANY)
        rng = random.Random(seed)
        await run.run_and_strike(STEPS, [rng.randrange(40) for _ in range(rng.randrange(1, 7))])
        met.update(run.slow.struck)
    assert met == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("port", ["train", "sync"])
async def test_an_error_that_is_no_death_voids_what_was_beside_it_too(
    build_config: Any, tmp_path: Path, port: str
) -> None:
    for when in range(8):
        run = Beside(build_config, tmp_path / str(when), seed=when, **MANY)
        run.slow.fails[port] = [*[None] * when, RuntimeError("injected")]
        await run.run(STEPS)
        assert run.trainer.restarts == 1
        assert run.slow.weight == await undisturbed(build_config, tmp_path / str(when))


async def test_a_version_that_a_restart_has_served_is_not_served_once_more(
    build_config: Any, tmp_path: Path
) -> None:
    run = Beside(build_config, tmp_path, seed=1)
    await run.trainer.train(batch(0))
    on_snapshot = asyncio.Event()
    run.slow.gate = asyncio.Event()
    syncing = asyncio.create_task(run.trainer.sync(on_snapshot.set))
    await on_snapshot.wait()
    run.slow.gate = None
    run.slow.strike()
    assert await syncing == 1
    assert [version for version, _ in run.slow.served] == [1]
    assert run.trainer.restarts == 1


async def test_a_sync_whose_version_was_overtaken_by_a_restart_tells_the_version_served(
    build_config: Any, tmp_path: Path
) -> None:
    """The step beside it had ended, so the ranks that begin again have the version after it."""
    run = Beside(build_config, tmp_path, seed=1)
    await run.trainer.train(batch(0))
    on_snapshot = asyncio.Event()
    run.slow.gate = asyncio.Event()
    syncing = asyncio.create_task(run.trainer.sync(on_snapshot.set))
    await on_snapshot.wait()
    await run.trainer.train(batch(1))
    run.slow.gate = None
    run.slow.strike()
    assert await syncing == 2
    assert [version for version, _ in run.slow.served] == [2]
    assert await run.trainer.sync() == 2
    assert [version for version, _ in run.slow.served] == [2]


async def test_a_receivers_failure_beside_a_step_ends_the_run_with_its_cause(
    build_config: Any, tmp_path: Path
) -> None:
    run = Beside(build_config, tmp_path, seed=2)
    gone = ActorDied("generator-0", "no replica is left")
    run.slow.foreign = gone
    with pytest.raises(ActorDied) as ended:
        await run.run(STEPS)
    assert ended.value is gone
    assert run.trainer.restarts == 0
    assert others() == set()


@pytest.mark.parametrize("seed", range(4))
async def test_a_budget_that_is_spent_beside_a_sync_ends_the_run_with_the_rank(
    build_config: Any, tmp_path: Path, seed: int
) -> None:
    run = Beside(build_config, tmp_path, seed, supervision={"trainer_restarts": 1})
    with pytest.raises(ActorDied, match=r"trainer\.2 died: .* have not helped"):
        await run.run_and_strike(STEPS, [20, 30])
    assert run.trainer.restarts == 1
    assert others() == set()


async def test_a_run_that_is_cancelled_at_any_moment_leaves_nothing_under_way(
    build_config: Any, tmp_path: Path
) -> None:
    for moment in range(0, 160, 3):
        run = Beside(build_config, tmp_path / str(moment), seed=moment, **MANY)
        running = asyncio.create_task(run.run_and_strike(STEPS, [moment // 2]))
        for _ in range(moment):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(3):
            await asyncio.sleep(0)
        assert (run.slow.training, run.slow.syncing) == (0, 0), moment
