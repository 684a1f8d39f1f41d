"""A trainer that loses its ranks: what is trained again, with which weights, and when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import Running, batch
from repetition import repeated

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.actors.learning.weight_update import GradientNotFinite, NotFinite, UpdatePart
from composer_mesh.configs.user_code import CustomFunctionError
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, RemoteError
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.tasks.errors import TaskCodeError

DEATH = ActorDied("trainer", "killed by signal 9")


@pytest.fixture
def run(build_config: Any, tmp_path: Path) -> Running:
    return Running(build_config, tmp_path)


async def undisturbed(build_config: Any, root: Path, steps: int, **sections: Any) -> float:
    run = Running(build_config, root / "undisturbed", **sections)
    await run.steps(0, steps)
    return run.world.weight


@pytest.mark.parametrize("when", range(11))
@pytest.mark.parametrize("where", ["train", "sync"])
async def test_a_death_at_any_step_leads_to_the_weights_of_the_undisturbed_run(
    run: Running, build_config: Any, tmp_path: Path, when: int, where: str
) -> None:
    run.world.fails[where] = [*[None] * when, DEATH]
    await run.steps(0, 12)
    assert run.trainer.restarts == 1
    assert run.world.weight == await undisturbed(build_config, tmp_path, 12)
    versions = [version for version, _ in run.world.served]
    assert versions == sorted(versions)
    assert len(set(run.world.served)) == 12  # a version that is served again is the same


async def test_only_the_steps_since_the_newest_checkpoint_are_trained_again(run: Running) -> None:
    run.world.fails["train"] = [*[None] * 6, DEATH]
    await run.steps(0, 7)
    assert run.world.done("begin") == [4]
    assert run.world.done("train") == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    (told,) = run.told()
    assert told == (
        "trainer died: killed by signal 9; began again from step 4's checkpoint, 2 steps trained "
        "again to the same losses and gradients, continues at version 6"
    )


async def test_a_death_before_the_first_checkpoint_begins_at_the_initial_policy(
    run: Running,
) -> None:
    run.world.fails["train"] = [None, None, DEATH]
    await run.steps(0, 3)
    assert run.world.done("begin") == [0]
    assert run.world.done("train") == [0, 1, 0, 1, 2]
    assert "began again from the start" in run.told()[0]


async def test_the_restarted_trainer_serves_its_version_again_before_it_trains_on(
    run: Running,
) -> None:
    run.world.fails["train"] = [*[None] * 5, DEATH]
    await run.steps(0, 6)
    assert [version for version, _ in run.world.served] == [1, 2, 3, 4, 5, 5, 6]


async def test_the_teachers_follow_the_replay_through_its_versions(run: Running) -> None:
    run.world.fails["train"] = [*[None] * 6, DEATH]
    await run.steps(0, 7)
    assert run.world.done("follow") == [4, 5]
    assert ("forget",) in run.world.log


@pytest.mark.parametrize("when", repeated(range(11), 4))
@pytest.mark.parametrize("where", ["train", "sync", "save", "saved"])
async def test_a_moving_average_goes_back_to_the_checkpoint_and_follows_from_there(
    build_config: Any, tmp_path: Path, when: int, where: str
) -> None:
    run = Running(build_config, tmp_path, sdpo={"teacher": "ema"})
    run.world.fails[where] = [*[None] * (when if where in ("train", "sync") else when % 3), DEATH]
    await run.steps(0, 12)
    assert run.trainer.restarts == 1
    assert run.told()[0].endswith(f"continues at version {run.told()[0].split()[-1]}")
    assert "without their SDPO signals" not in run.told()[0]
    other = await undisturbed(build_config, tmp_path, 12, sdpo={"teacher": "ema"})
    assert run.world.weight == other


async def test_without_a_kept_average_its_steps_are_trained_without_it_and_the_events_say_so(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, sdpo={"teacher": "ema"})
    run.world.fails["keep"] = [AverageLost("no SDPO teacher is alive")]
    run.world.fails["train"] = [*[None] * 6, DEATH]
    await run.steps(0, 7)
    assert ("train", 4, False) in run.world.log
    assert "2 of them without their SDPO signals, so its version is served anew" in run.told()[0]
    assert "differ by up to" in run.told()[0]
    (lost,) = [event for event in run.world.events if event[0] == "average_not_kept"]
    assert lost[2] == (
        "step 4's checkpoint is without the SDPO teachers' average: no SDPO teacher is alive"
    )


async def test_a_step_that_had_lost_its_signals_is_trained_again_without_them(
    run: Running, build_config: Any, tmp_path: Path
) -> None:
    world = run.world
    await run.trainer.train(batch(0))
    await run.trainer.sync()
    run.trainer._since[0].metrics["sdpo/lost_steps"] = 1
    world.fails["train"] = [DEATH]
    await run.trainer.train(batch(1))
    assert world.log[-2:] == [("train", 0, False), ("train", 1, None)]


async def test_a_step_that_had_its_signals_requires_them_when_it_is_trained_again(
    run: Running,
) -> None:
    run.world.fails["train"] = [*[None] * 2, DEATH]
    await run.steps(0, 3)
    outputs = [entry[2] for entry in run.world.log if entry[0] == "train"]
    assert outputs == [None, None, True, True, None]


async def test_ranks_that_die_again_while_they_catch_up_begin_once_more(
    run: Running, build_config: Any, tmp_path: Path
) -> None:
    second = ActorDied("trainer.2", "killed by signal 9")
    run.world.fails["train"] = [*[None] * 6, DEATH, None, second]
    await run.steps(0, 12)
    assert run.trainer.restarts == 2
    assert run.world.weight == await undisturbed(build_config, tmp_path, 12)


async def test_the_budget_ends_the_run_with_the_rank_and_its_cause(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, supervision={"trainer_restarts": 2})
    deaths = [ActorDied("trainer" + name, "memory") for name in ("", ".2", ".3")]
    run.world.fails["train"] = [None, *deaths]
    with pytest.raises(ActorDied) as ended:
        await run.steps(0, 3)
    assert str(ended.value) == ("trainer.3 died: memory; 2 restarts of the trainer have not helped")


async def test_without_a_budget_a_death_ends_the_run_as_it_is(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, supervision={"trainer_restarts": 0})
    run.world.fails["train"] = [DEATH]
    with pytest.raises(ActorDied, match=r"^trainer died: killed by signal 9$"):
        await run.steps(0, 1)


async def test_without_checkpoints_no_batch_is_kept_and_a_death_ends_the_run(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, trainer={"checkpoint_every": 0})
    run.world.fails["train"] = [None, DEATH]
    with pytest.raises(ActorDied, match=r"set trainer\.checkpoint_every"):
        await run.steps(0, 2)
    assert run.trainer._since == []


@pytest.mark.parametrize(
    "error", [ValueError("views but no signal"), RemoteError("trainer.2", "train", "odd")]
)
async def test_an_error_that_comes_again_at_the_same_step_ends_the_run(
    run: Running, error: Exception
) -> None:
    run.world.generation = 1 if isinstance(error, ValueError) else 2
    run.world.fails["train"] = [None, error, None, error]
    run.world.names = lambda: ["trainer.2"]  # type: ignore[method-assign]
    with pytest.raises(type(error)) as raised:
        await run.steps(0, 3)
    assert raised.value is error
    assert run.trainer.restarts == 1


async def test_an_error_that_does_not_come_again_costs_a_restart(
    run: Running, build_config: Any, tmp_path: Path
) -> None:
    run.world.fails["train"] = [None, None, RuntimeError("injected")]
    await run.steps(0, 12)
    assert run.told()[0].startswith("RuntimeError: injected; began again from the start")
    assert run.world.weight == await undisturbed(build_config, tmp_path, 12)


async def test_a_gradient_that_is_not_finite_restarts_nothing(run: Running) -> None:
    part = UpdatePart("microbatch 2 of 4", ("train-000001-003-02",), (3,))
    found = [NotFinite("the policy loss is nan", part)]
    error = GradientNotFinite(1, float("nan"), 1e-5, 0, {}, found)
    run.world.fails["train"] = [None, error]
    with pytest.raises(GradientNotFinite, match=r"policy loss is nan in microbatch 2 of 4 \(roll"):
        await run.steps(0, 3)
    assert run.trainer.restarts == 0
    assert run.world.done("train") == [0]
    (event,) = [event for event in run.world.events if event[0] == "gradient_not_finite"]
    assert "step 2 was not trained" in event[2]


@pytest.mark.parametrize(
    "error",
    [
        CustomFunctionError("users.loss", "sequence 0", "it raised KeyError: 'a'", "users.py:3"),
        TaskCodeError("the expert of task 'sums'", "sums.py:3", "KeyError: 'a'"),
        DeadlineExceeded("trainer", "train", 1.0, "", True),
    ],
)
async def test_an_error_that_states_its_cause_ends_the_run_without_a_restart(
    run: Running, error: Exception
) -> None:
    run.world.fails["train"] = [None, error]
    with pytest.raises(type(error)) as raised:
        await run.steps(0, 3)
    assert raised.value is error
    assert run.trainer.restarts == 0
    assert run.world.done("begin") == []
    assert run.told() == []


async def test_a_rank_that_gives_no_answer_in_time_is_replaced(run: Running) -> None:
    run.world.fails["train"] = [None, DeadlineExceeded("trainer", "train", 1.0)]
    await run.steps(0, 3)
    assert run.trainer.restarts == 1


async def test_the_death_of_another_actor_is_none_of_its_business(run: Running) -> None:
    run.world.fails["sync"] = [ActorDied("generator-0", "gone")]
    with pytest.raises(ActorDied, match="generator-0"):
        await run.steps(0, 1)
    assert run.trainer.restarts == 0


async def test_a_checkpoint_that_a_death_interrupted_is_written_after_it(run: Running) -> None:
    run.world.fails["save"] = [DEATH]
    await run.steps(0, 5)
    assert run.world.done("save") == [4]
    assert run.world.done("begin") == [0]
    assert run.trainer._since[0].batch.step == 4


async def test_the_last_two_checkpoints_are_kept_beside_the_final_one(run: Running) -> None:
    await run.steps(0, 11)
    kept = run.root / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step-4", "step-8"]
    await run.trainer.train(batch(11))
    await run.trainer.save(12)
    assert sorted(path.name for path in kept.iterdir()) == ["step-12", "step-4", "step-8"]


async def test_a_resumed_trainer_begins_again_from_the_checkpoint_that_it_was_given(
    run: Running,
) -> None:
    await run.steps(0, 4)
    run.trainer = run.made(Checkpoint(4, run.root / "checkpoints" / "step-4"))
    run.world.fails["train"] = [None, DEATH]
    await run.steps(4, 7)
    assert run.world.done("begin") == [4]
    assert run.world.done("train")[-3:] == [4, 5, 6]


async def test_cancelling_is_no_failure(run: Running) -> None:
    async def forever(*_: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    run.world.train = forever  # type: ignore[method-assign]
    step = asyncio.create_task(run.trainer.train(batch(0)))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert run.trainer.restarts == 0


async def test_a_rank_that_dies_while_nobody_trains_is_replaced_at_once(run: Running) -> None:
    async def rollouts() -> None:
        await run.steps(0, 6)
        run.world.kill(DEATH)
        await run.world.told.wait()
        assert run.world.served[-1] == run.world.served[-2]  # version 6, from other memory
        await run.steps(6, 7)

    await run.trainer.during(rollouts())
    assert run.trainer.restarts == 1
    assert run.world.done("train")[-3:] == [4, 5, 6]


async def test_a_death_without_a_restart_left_ends_the_work_that_nobody_trains_in(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, supervision={"trainer_restarts": 0})

    async def rollouts() -> None:
        run.world.kill(DEATH)
        await asyncio.Event().wait()

    with pytest.raises(ActorDied, match="trainer died"):
        await run.trainer.during(rollouts())


async def test_work_that_fails_by_itself_fails_as_it_is(run: Running) -> None:
    async def rollouts() -> None:
        raise LookupError("no group")

    with pytest.raises(LookupError, match="no group"):
        await run.trainer.during(rollouts())
    assert run.trainer.restarts == 0
