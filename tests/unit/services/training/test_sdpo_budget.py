"""Teachers that fail: replaced within a budget, given up beyond it, never waited for in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_teachers import FakeActor, FakeTeacher, Ring, batch, config, training, weights

from composer_mesh.mesh.supervision import ActorDied


async def test_a_teacher_that_raises_is_replaced_and_the_step_is_served(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, when_lost="wait"), ranks=[3])
    (teacher,) = await ring.begin()
    teacher.error = RuntimeError("injected")
    await asyncio.wait_for(training(ring, settings).train(batch()), 5)
    assert len(ring.ranks[0].taken) == 3
    assert ring.of("lost") == [("lost", "sdpo_teacher", "RuntimeError: injected")]
    assert ring.host.started[1].served == 3
    assert [event[0] for event in ring.events] == ["actor_restarted"]


async def test_an_error_that_the_replacement_raises_too_is_the_steps(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, when_lost="wait"), ranks=[3])
    (teacher,) = await ring.begin()
    teacher.error = RuntimeError("a bug")
    ring.host.prepare = lambda replacement: setattr(replacement, "error", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(training(ring, settings).train(batch()), 5)
    assert len(ring.host.started) == 2


async def test_an_error_of_a_rank_costs_no_teacher(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    await ring.begin()
    ring.ranks[0].error = RuntimeError("the rank's own")
    with pytest.raises(RuntimeError, match="the rank's own"):
        await asyncio.wait_for(training(ring, settings).train(batch()), 5)
    assert (len(ring.host.started), ring.events) == (1, [])


@pytest.mark.parametrize("when_lost", ["skip", "wait"])
async def test_where_one_is_given_up_the_others_serve_the_steps(
    build_config: Any, when_lost: str
) -> None:
    settings = config(build_config, restarts=0, replicas=2, when_lost=when_lost)
    ring = Ring(settings, ranks=[3])
    dead, other = await ring.begin()
    dead.die()
    for step in range(2):
        ring.ranks[0].taken.clear()
        await asyncio.wait_for(training(ring, settings).train(batch(step=step)), 5)
        assert len(ring.ranks[0].taken) == 3
    assert other.served == 6
    (event,) = ring.events
    assert event[:2] == ("actor_given_up", "sdpo_teacher-0")
    assert event[2].startswith("killed; given up after 0 restarts within 300 s")


async def test_with_wait_another_takes_over_the_share_of_one_that_is_given_up(
    build_config: Any,
) -> None:
    settings = config(build_config, restarts=0, replicas=2, when_lost="wait")
    ring = Ring(settings, ranks=[3])
    dead, other = await ring.begin()
    dead.block(0)
    step = asyncio.create_task(training(ring, settings).train(batch()))
    await ring.settle()
    dead.die()
    await asyncio.wait_for(step, 5)
    assert len(ring.ranks[0].taken) == 3
    assert other.served == 3


async def test_a_teacher_that_fails_to_follow_is_replaced(build_config: Any) -> None:
    ring = Ring(config(build_config))
    (teacher,) = await ring.begin()

    async def fail(_: Any) -> int:
        raise ActorDied("sdpo_teacher", "it gave no answer within 30 s and was killed")

    teacher.pull = fail  # type: ignore[method-assign]
    assert await ring.sdpo.pull(weights(3)) == []
    await ring.settle()
    assert ring.of("pull") == [("pull", "sdpo_teacher", 3)]
    assert ring.sdpo.restarts == 1


async def test_the_end_of_the_trainer_ends_a_pull_and_costs_no_teacher(build_config: Any) -> None:
    ring = Ring(config(build_config))
    (teacher,) = await ring.begin()
    trainer: Any = FakeActor("trainer", ring.log)
    teacher.block("pull")
    pulling = asyncio.create_task(ring.sdpo.pull(weights(3), trainer))
    await ring.settle()
    trainer.die()
    with pytest.raises(ActorDied, match="trainer died: killed"):
        await asyncio.wait_for(pulling, 5)
    assert len(ring.host.started) == 1


async def test_a_replacement_waits_for_what_takes_the_place_of_a_dead_trainer(
    build_config: Any,
) -> None:
    ring = Ring(config(build_config))
    (teacher,) = await ring.begin()
    trainer: Any = FakeActor("trainer", ring.log)
    await ring.sdpo.pull(weights(3), trainer)
    trainer.die()
    teacher.die()
    await ring.sdpo.ready(3)
    await ring.settle()
    replacement = ring.host.started[1]
    assert isinstance(replacement, FakeTeacher)
    assert (replacement.version, ring.sdpo.restarts) == (0, 0)
    assert await ring.sdpo.pull(weights(3)) == []
    await ring.settle()
    assert (replacement.version, ring.sdpo.restarts) == (3, 1)
