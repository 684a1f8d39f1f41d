"""A teacher that dies: the step goes on as configured, says so, and the next ones have it back.

Teachers that fail: replaced within a budget, given up beyond it, never waited for in vain.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hinted
import pytest
from fake_teachers import FakeActor, FakeTeacher, Ring, batch, config, training, weights

from composer_mesh.mesh.supervision import ActorDied


async def killed(
    ring: Ring, settings: Any, where: str, required: bool | None = None
) -> dict[str, Any]:
    """A step whose first teacher dies at a point: the metrics that the step ends with."""
    teacher, rank = ring.host.started[0], ring.ranks[0]
    if where == "reading":
        rank.block(1)  # a read of memory that is gone would wait for long
    else:
        teacher.block({"head": "head", "computing": 1}[where])
    step = asyncio.create_task(training(ring, settings).train(batch(), required))
    await ring.settle()
    assert not step.done()
    teacher.die()
    await ring.settle()
    if where == "reading":
        rank.gates.pop(1).set()
    return await step


@pytest.mark.parametrize("where", ["computing", "reading"])
async def test_with_skip_the_step_ends_without_the_channel_and_says_so(
    build_config: Any, where: str
) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    await ring.begin()
    await killed(ring, settings, where)
    assert ring.ranks[0].lost == "sdpo_teacher died: killed"
    await ring.settle()
    told = {event[0]: event[2] for event in ring.events}
    assert told.keys() == {"sdpo_lost", "actor_restarted"}
    assert told["sdpo_lost"] == "step 1: sdpo_teacher died: killed"
    assert ring.log.index(("lost", "sdpo_teacher", "killed")) < ring.log.index(
        ("stop", "sdpo_teacher")  # or its death would look like a planned stop
    )
    assert ring.sdpo.restarts == 1


async def test_with_skip_every_rank_is_told(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[2, 1])
    await ring.begin()
    await killed(ring, settings, "computing")
    assert sorted(ring.of("lose")) == [("lose", f"trainer-{n}", 0) for n in (0, 1)]


@pytest.mark.parametrize(("when_lost", "required"), [("wait", None), ("skip", True)])
@pytest.mark.parametrize("where", ["computing", "reading"])
async def test_the_replacement_serves_what_was_not_delivered_to_a_step_that_waits(
    build_config: Any, where: str, when_lost: str, required: bool | None
) -> None:
    ring = Ring(settings := config(build_config, when_lost=when_lost), ranks=[3])
    await ring.begin()
    await killed(ring, settings, where, required)
    assert ring.ranks[0].lost == ""
    taken = {micro: views for micro, _, views in ring.ranks[0].taken}
    assert taken == {n: ((f"t{n}", 0),) for n in range(3)}
    assert [event[0] for event in ring.events] == ["actor_restarted"]
    replacement = ring.host.started[1]
    assert replacement.served == 2  # the first microbatch had been delivered
    assert replacement.held == set()


async def test_with_wait_other_teachers_go_on_meanwhile(build_config: Any) -> None:
    settings = config(build_config, when_lost="wait", replicas=2)
    ring = Ring(settings, ranks=[6])
    dead, survivor = await ring.begin()
    dead.block(0)
    ring.host.prepare = lambda teacher: teacher.gates.update(load=asyncio.Event())
    views = [hinted.view(f"t{n // 2}", turn=n % 2) for n in range(6)]
    step = asyncio.create_task(training(ring, settings).train(batch(3, views)))
    await ring.settle()
    dead.die()
    await ring.settle()
    assert not step.done()
    assert survivor.served == 3
    ring.host.started[2].gates.pop("load").set()
    await step
    assert sorted(ring.ranks[0].taken) == [
        (n // 2, n % 2, ((f"t{n // 2}", n % 2),)) for n in range(6)
    ]


async def test_the_next_step_has_the_replacement(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    await ring.begin()
    await killed(ring, settings, "computing")
    await ring.settle()
    ring.ranks[0].taken.clear()
    ring.ranks[0].lost = ""
    await training(ring, settings).train(batch(step=1))
    assert len(ring.ranks[0].taken) == 3
    assert ring.host.started[1].served == 3


@pytest.mark.parametrize(
    ("when_lost", "required", "teachers"), [("skip", None, 0), ("wait", None, 1), ("skip", True, 1)]
)
async def test_a_step_that_begins_while_the_only_teacher_is_gone(
    build_config: Any, when_lost: str, required: bool | None, teachers: int
) -> None:
    ring = Ring(settings := config(build_config, when_lost=when_lost), ranks=[3])
    (dead,) = await ring.begin()
    dead.die()
    await training(ring, settings).train(batch(), required)
    assert ring.of("train") == [("train", "trainer-0", 0, teachers)]
    lost = [event for event in ring.events if event[0] == "sdpo_lost"]
    assert len(lost) == 1 - teachers


class DiesAsItServes(Ring):
    """The first replacement dies at the moment when it serves."""

    def record(self, *event: str, **fields: Any) -> None:
        super().record(*event, **fields)
        if event[0] == "actor_restarted" and len(self.events) == 1:
            self.host.started[-1].die()


async def test_a_step_that_waits_outlasts_a_replacement_that_dies_as_it_serves(
    build_config: Any,
) -> None:
    ring = DiesAsItServes(settings := config(build_config), ranks=[3])
    (dead,) = await ring.begin()
    dead.die()
    await training(ring, settings).train(batch(), True)
    assert ring.of("train") == [("train", "trainer-0", 0, 1)]
    assert [event[0] for event in ring.events] == ["actor_restarted"] * 2


async def test_with_skip_the_others_serve_a_step_that_begins_without_one(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, replicas=2), ranks=[3])
    dead, _ = await ring.begin()
    dead.die()
    await training(ring, settings).train(batch())
    assert ring.of("train") == [("train", "trainer-0", 0, 1)]
    assert {entry[1] for entry in ring.of("teacher_output")} == {"sdpo_teacher-1"}


@pytest.mark.parametrize("when_lost", ["skip", "wait"])
async def test_a_teacher_may_die_while_it_makes_its_head(build_config: Any, when_lost: str) -> None:
    settings = config(build_config, teacher="ema", when_lost=when_lost)
    ring = Ring(settings, ranks=[3])
    await ring.begin()
    await killed(ring, settings, "head")
    assert bool(ring.ranks[0].lost) == (when_lost == "skip")
    assert len(ring.ranks[0].taken) == (0 if when_lost == "skip" else 3)


async def test_a_replacement_brings_its_own_head_before_its_signals(build_config: Any) -> None:
    settings = config(build_config, teacher="ema", when_lost="wait")
    ring = Ring(settings, ranks=[3])
    await ring.begin()
    await killed(ring, settings, "computing")
    kinds = [entry[0] for entry in ring.log if entry[0] in ("head", "teacher_output", "stop")]
    before, after = kinds[: kinds.index("stop")], kinds[kinds.index("stop") :]
    assert before[0] == "head"
    assert after[:2] == ["stop", "head"]
    assert set(after[2:]) == {"teacher_output"}


async def replaced(ring: Ring, version: int) -> None:
    """A teacher that dies while it pulls a version, and its replacement."""
    dead, *others = ring.host.started
    dead.block("pull")
    pulling = asyncio.create_task(ring.sdpo.pull(weights(version)))
    await ring.settle()
    dead.die()
    served = await pulling
    assert served == [version] * len(others)
    await ring.settle()


@pytest.mark.parametrize("teacher", ["live", "frozen", "trust_region"])
async def test_a_replacement_pulls_the_version_that_the_others_serve(
    build_config: Any, teacher: str
) -> None:
    ring = Ring(config(build_config, teacher=teacher))
    await ring.begin()
    await replaced(ring, 4)
    assert ring.of("pull") == [("pull", "sdpo_teacher", 4)]
    assert ring.events == [
        ("actor_restarted", "sdpo_teacher", f"process {ring.host.started[1].pid}, at version 4")
    ]


async def test_an_average_is_taken_over_from_a_teacher_that_lives(build_config: Any) -> None:
    ring = Ring(config(build_config, teacher="ema", replicas=2))
    await ring.begin()
    await replaced(ring, 4)
    assert ring.of("state") == [("state", "sdpo_teacher-1")]
    assert ring.of("adopt") == [("adopt", "sdpo_teacher-0", 4)]
    assert "its average taken from sdpo_teacher-1" in ring.events[0][2]
    adopted = ring.log.index(("adopt", "sdpo_teacher-0", 4))
    assert ring.log.index(("release_state", "sdpo_teacher-1")) > adopted
    assert ring.of("release_state") == [("release_state", "sdpo_teacher-1")]


async def test_a_copy_of_an_average_is_freed_when_its_receiver_dies(build_config: Any) -> None:
    ring = Ring(config(build_config, teacher="ema", replicas=2))
    await ring.begin()
    ring.host.prepare = lambda teacher: teacher.gates.update(adopt=asyncio.Event())
    await ring.sdpo.pull(weights(4))
    ring.host.started[0].die()
    await ring.sdpo.ready(4)
    await ring.settle()
    assert len(ring.of("state")) == 1
    assert ring.of("release_state") == []
    ring.host.prepare = lambda _: None
    ring.host.started[2].die()
    await ring.settle()
    assert len(ring.of("release_state")) == 2
    assert len(ring.of("adopt")) == 1


async def test_an_average_that_nobody_has_begins_again_and_that_is_told(build_config: Any) -> None:
    ring = Ring(config(build_config, teacher="ema"))
    await ring.begin()
    await replaced(ring, 4)
    assert ring.of("adopt") == [("adopt", "sdpo_teacher", 4)]
    assert "its average restarts there" in ring.events[0][2]


@pytest.mark.parametrize("when_lost", ["skip", "wait"])
async def test_a_replacement_that_dies_too_ends_the_run_with_its_reason(
    build_config: Any, when_lost: str
) -> None:
    ring = Ring(settings := config(build_config, when_lost=when_lost), ranks=[3])
    (dead,) = await ring.begin()
    ring.host.prepare = FakeTeacher.die
    dead.die()
    if when_lost == "skip":  # the step that finds it out does not wait for the replacement
        await training(ring, settings).train(batch())
        await ring.settle()
    with pytest.raises(ActorDied, match="sdpo_teacher died"):
        await training(ring, settings).train(batch())


async def test_the_end_of_a_run_ends_replacements_under_way(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (dead,) = await ring.begin()
    ring.host.prepare = lambda teacher: teacher.gates.update(load=asyncio.Event())
    dead.die()
    await training(ring, settings).train(batch())
    await ring.settle()
    await ring.sdpo.close()
    assert ring.sdpo.restarts == 0


async def test_a_teacher_whose_host_is_lost_comes_again_where_its_seat_is_then(
    build_config: Any,
) -> None:
    ring = Ring(config(build_config, replicas=2))
    ring.placements = {0: "a", 1: "b"}
    first, _ = await ring.begin()
    assert ring.host.where == ["a", "b"]
    ring.placements[0] = "b"
    first.die()
    assert [teacher.name for teacher in await ring.sdpo.ready(0)] == ["sdpo_teacher-1"]
    await ring.settle()
    assert ring.host.where == ["a", "b", "b"]
    assert len(ring.sdpo.alive()) == 2


async def test_a_teacher_that_raises_is_replaced_and_the_step_is_served(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, when_lost="wait"), ranks=[3])
    (teacher,) = await ring.begin()
    teacher.error = RuntimeError("injected")
    await training(ring, settings).train(batch())
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
        await training(ring, settings).train(batch())
    assert len(ring.host.started) == 2


async def test_an_error_of_a_rank_costs_no_teacher(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    await ring.begin()
    ring.ranks[0].error = RuntimeError("the rank's own")
    with pytest.raises(RuntimeError, match="the rank's own"):
        await training(ring, settings).train(batch())
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
        await training(ring, settings).train(batch(step=step))
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
    await step
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
        await pulling
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
