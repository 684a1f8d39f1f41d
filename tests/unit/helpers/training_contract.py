"""What every implementation of the ports `StepAttempt` and `Training` does, real or not.

Each claim is a coroutine function that takes a harness at version 0. In the order of the lists one
harness can go through all claims, with `restart_from` before each.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import hinted
import pytest

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.batches import Skipped, StepBatch
from composer_mesh.services.steps.logprob_mismatch import COMPARED
from composer_mesh.services.steps.ports import Training
from composer_mesh.services.training.checkpoint_writes import StepAttempt


class StepHarness(Protocol):
    """A trainer whose steps are tried, and what else can be done to it."""

    step: StepAttempt

    async def version(self) -> int: ...

    async def serve(self) -> None:
        """Bring the newest version to the teachers."""
        ...

    async def restart_from(self) -> None:
        """Bring the trainer, dead or not, to version 0."""
        ...

    async def kill(self) -> None:
        """End a process of the trainer, or what stands for it. Waits until that is known."""
        ...


class TrainingHarness(Protocol):
    """A trainer behind its port, and how its next step is made to fail."""

    training: Training

    async def version(self) -> int: ...

    def fail(self) -> None: ...


StepClaim = Callable[[StepHarness], Awaitable[None]]
TrainingClaim = Callable[[TrainingHarness], Awaitable[None]]


def batch(step: int, views: bool = False) -> StepBatch:
    """One sample, with an error site where a view is asked for."""
    return hinted.batch([10], [hinted.view("t0")] if views else [], step=step)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Metrics are what a line of `metrics.jsonl` may hold, and have a loss."""
    assert json.loads(json.dumps(metrics)) == metrics
    assert isinstance(metrics["loss/total"], float)


async def each_batch_makes_the_next_version(harness: StepHarness) -> None:
    for step in range(3):
        assert await harness.version() == step
        check_metrics(await harness.step.train(batch(step, views=step == 1)))
        await harness.serve()
    assert await harness.version() == 3


async def a_batch_of_another_version_is_refused_and_trains_nothing(harness: StepHarness) -> None:
    await harness.step.train(batch(0))
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"the batch of step {step} trains version {step}"):
            await harness.step.train(batch(step))
    assert await harness.version() == 1
    await harness.step.train(batch(1))


async def a_step_without_teachers_of_the_mesh_that_needs_none_is_not_lost(
    harness: StepHarness,
) -> None:
    for step, outputs in enumerate((True, False)):
        assert not (await harness.step.train(batch(step), outputs)).get("sdpo/lost_steps")


async def a_step_that_is_trained_again_has_the_same_metrics(harness: StepHarness) -> None:
    first = await two_steps(harness)
    await harness.restart_from()
    again = await two_steps(harness)
    for one, two in zip(first, again, strict=True):
        assert two == pytest.approx(one, rel=1e-6)


async def two_steps(harness: StepHarness) -> list[dict[str, float]]:
    """What is compared of two steps with teacher outputs."""
    found = []
    for step in range(2):
        metrics = await harness.step.train(batch(step, views=True))
        found.append({name: metrics[name] for name in COMPARED if name in metrics})
        await harness.serve()
    return found


async def a_batch_in_which_nothing_is_left_to_train_makes_a_version(harness: StepHarness) -> None:
    await harness.step.train(replace(batch(0), samples=[], skipped=Skipped(2, 9)))
    assert await harness.version() == 1


async def a_step_does_not_change_its_batch(harness: StepHarness) -> None:
    one = batch(0, views=True)
    await harness.step.train(one)
    assert one == batch(0, views=True)


async def a_step_of_a_dead_trainer_fails_with_the_death(harness: StepHarness) -> None:
    await harness.kill()
    with pytest.raises(ActorDied):
        await harness.step.train(batch(0))


async def a_step_without_teacher_outputs_says_that_it_lacks_them(harness: StepHarness) -> None:
    """Only where teachers have processes of their own."""
    metrics = await harness.step.train(batch(0, views=True), False)
    assert metrics["sdpo/lost_steps"] == 1


STEP_CLAIMS: tuple[StepClaim, ...] = (
    each_batch_makes_the_next_version,
    a_batch_of_another_version_is_refused_and_trains_nothing,
    a_step_without_teachers_of_the_mesh_that_needs_none_is_not_lost,
    a_step_that_is_trained_again_has_the_same_metrics,
    a_batch_in_which_nothing_is_left_to_train_makes_a_version,
    a_step_does_not_change_its_batch,
    a_step_of_a_dead_trainer_fails_with_the_death,
)


STEP_CLAIMS_OF_PROCESSES: tuple[StepClaim, ...] = (
    a_batch_of_another_version_is_refused_and_trains_nothing,
    a_step_of_a_dead_trainer_fails_with_the_death,
)
"""What is different between processes: errors cross them."""


async def trained_batches_make_versions(harness: TrainingHarness) -> None:
    for step in range(3):
        assert await harness.version() == step
        check_metrics(await harness.training.train(batch(step)))
    assert await harness.version() == 3


async def metrics_are_the_callers_own(harness: TrainingHarness) -> None:
    (await harness.training.train(batch(0))).clear()
    check_metrics(await harness.training.train(batch(1)))


async def a_batch_out_of_order_is_refused_and_trains_nothing(harness: TrainingHarness) -> None:
    await harness.training.train(batch(0))
    with pytest.raises(ValueError, match="the batch of step 2 trains version 2 of the policy"):
        await harness.training.train(batch(2))


async def a_step_that_fails_raises_and_makes_no_version(harness: TrainingHarness) -> None:
    harness.fail()
    with pytest.raises(Exception, match=r"killed|train"):
        await harness.training.train(batch(0))
    assert await harness.version() == 0


TRAINING_CLAIMS: tuple[TrainingClaim, ...] = (
    trained_batches_make_versions,
    metrics_are_the_callers_own,
    a_batch_out_of_order_is_refused_and_trains_nothing,
    a_step_that_fails_raises_and_makes_no_version,
)
