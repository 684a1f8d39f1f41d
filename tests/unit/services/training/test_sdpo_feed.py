"""A step's signals on their way: who is asked for what, in which order, and what overlaps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hinted
import pytest
from fake_teachers import BUDGET, Ring, batch, config, training

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, plan_step
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.training.step import MeshTraining, joined
from composer_mesh.services.training.teaching import requests_for


def plans(one: StepBatch, ranks: int = 1) -> list[RankPlan]:
    return plan_step(one, BUDGET, ranks)


async def test_each_microbatch_is_asked_for_in_order_delivered_and_released(
    build_config: Any,
) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (teacher,) = await ring.begin()
    metrics = await training(ring, settings).train(batch())
    assert ring.of("train") == [("train", "trainer-0", 0, 1)]
    assert [entry[2] for entry in ring.of("teacher_output")] == [((f"t{n}", 0),) for n in range(3)]
    assert ring.of("take") == [("take", "trainer-0", micro, 0) for micro in range(3)]
    assert ring.ranks[0].taken == [(n, 0, ((f"t{n}", 0),)) for n in range(3)]
    assert teacher.held == set()
    assert metrics == {"loss/total": 1.0, "sdpo/bytes": 30.0, "sdpo/bytes_per_token": 7}
    assert ring.events == []


async def test_a_teacher_holds_two_requests_beside_the_one_that_travels(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (teacher,) = await ring.begin()
    reading = ring.ranks[0].block(0)
    step = asyncio.create_task(training(ring, settings).train(batch()))
    await ring.settle()
    assert len(ring.of("teacher_output")) == 3
    assert ring.of("take") == []
    reading.set()
    await step
    assert teacher.held == set()


async def test_teachers_share_the_views_of_each_microbatch(build_config: Any) -> None:
    one = batch(2, [hinted.view(f"t{n // 4}", turn=n % 4) for n in range(8)])
    ring = Ring(settings := config(build_config, replicas=2), ranks=[4])
    await ring.begin()
    await training(ring, settings).train(one)
    assert ring.of("train") == [("train", "trainer-0", 0, 2)]
    first, last = [(0, 1), (2, 3)], [(2, 3), (0, 1)]
    for name, runs in (("sdpo_teacher-0", first), ("sdpo_teacher-1", last)):
        asked = [entry[2] for entry in ring.of("teacher_output") if entry[1] == name]
        assert asked == [tuple((f"t{n}", turn) for turn in runs[n]) for n in (0, 1)]


async def test_microbatches_of_one_view_keep_all_teachers_at_work(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, replicas=2), ranks=[4])
    teachers = await ring.begin()
    await training(ring, settings).train(batch(4))
    assert [teacher.served for teacher in teachers] == [2, 2]


async def test_a_slow_teacher_does_not_keep_another_from_its_next_part(build_config: Any) -> None:
    one = batch(2, [hinted.view(f"t{n // 2}", turn=n % 2) for n in range(4)])
    ring = Ring(settings := config(build_config, replicas=2), ranks=[4])
    slow, _ = await ring.begin()
    gate = slow.block(0)
    step = asyncio.create_task(training(ring, settings).train(one))
    await ring.settle()
    assert [entry[1] for entry in ring.of("teacher_output")].count("sdpo_teacher-1") == 2
    assert len(ring.of("take")) < 4
    gate.set()
    await step


def test_requests_come_in_the_order_in_which_the_ranks_will_need_them() -> None:
    """By microbatch: ranks of a sharded model are never further apart than one of them."""
    uneven = hinted.batch([BUDGET] * 5, [hinted.view(f"t{n}") for n in (0, 1, 2, 4)])
    found = requests_for(0, uneven, plans(uneven, 2), 1)
    asked = [(one.share, one.microbatch) for one in found]
    wanted = [
        [(rank, index) for index, micro in enumerate(plan.microbatches) if micro.views]
        for rank, plan in enumerate(plans(uneven, 2))
    ]
    assert sorted(asked) == sorted(wanted[0] + wanted[1])
    assert asked == sorted(asked, key=lambda one: (one[1], one[0]))


async def test_the_ranks_of_a_context_get_each_output_that_is_computed_once(
    build_config: Any,
) -> None:
    ring = Ring(settings := config(build_config, context=2), ranks=[3, 3])
    (teacher,) = await ring.begin()
    await training(ring, settings).train(batch())
    assert len(ring.of("teacher_output")) == teacher.served == 3
    for rank in ring.ranks:
        assert rank.taken == [(n, 0, ((f"t{n}", 0),)) for n in range(3)]
    assert teacher.held == set()


@pytest.mark.parametrize("teachers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_requests_of_a_step_cover_its_views_exactly_once(ranks: int, teachers: int) -> None:
    views = [hinted.view(f"t{n % 4}", turn=n, context=3 + n) for n in range(11)]
    one = hinted.batch([40, 60, 500, 90], views)
    found = [
        view.turn
        for part in range(teachers)
        for request in requests_for(part, one, plans(one, ranks), teachers)
        for view in request.views
    ]
    assert sorted(found) == list(range(11))


async def test_a_rank_without_error_sites_gets_nothing_and_the_step_ends(build_config: Any) -> None:
    one = batch(2, [hinted.view("t0")])
    ring = Ring(settings := config(build_config), ranks=[1, 0])
    await ring.begin()
    metrics = await training(ring, settings).train(one)
    assert [rank.taken for rank in ring.ranks] == [[(0, 0, (("t0", 0),))], []]
    assert metrics["sdpo/bytes"] == 10.0


async def test_a_step_without_views_asks_nobody(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[0])
    await ring.begin()
    metrics = await training(ring, settings).train(batch(2, []))
    assert ring.log == [("train", "trainer-0", 0, 0)]
    assert metrics["sdpo/bytes"] == 0


async def test_the_divergences_of_all_ranks_are_kept_where_there_are_some(
    build_config: Any,
) -> None:
    ring = Ring(settings := config(build_config), ranks=[1, 1, 0])
    await ring.begin()
    kept: list[tuple[int, list[str]]] = []

    def keep(step: int, found: Sequence[TurnDivergences]) -> None:
        kept.append((step, [one.trace_id for one in found]))

    step = MeshTraining(settings, lambda: ring.ranks, ring.sdpo, keep)  # type: ignore[arg-type]
    await step.train(batch(2, [hinted.view("t0"), hinted.view("t1")]))
    for rank in ring.ranks:
        rank.taken.clear()
    await step.train(replace(batch(2, []), step=1))
    assert kept == [(0, ["trainer-0", "trainer-1"])]


async def test_without_teachers_of_its_own_a_run_only_trains(build_config: Any) -> None:
    ring = Ring(settings := config(build_config, placement="inline"), ranks=[1])
    await MeshTraining(settings, lambda: ring.ranks, None).train(batch())  # type: ignore[arg-type]
    assert ring.log == [("train", "trainer-0", 0, 0)]


async def test_a_teacher_is_told_what_the_student_chose(build_config: Any) -> None:
    ring = Ring(
        settings := config(build_config, teacher_output="topk", top_k_choice="student"), ranks=[3]
    )
    await ring.begin()
    await training(ring, settings).train(batch())
    assert [entry[3] for entry in ring.of("teacher_output")] == [
        f"choice of {n} for 0" for n in range(3)
    ]


@pytest.mark.parametrize("teacher", ["ema", "frozen", "trust_region"])
async def test_a_head_of_the_teachers_own_comes_to_every_rank_before_any_signal(
    build_config: Any, teacher: str
) -> None:
    settings = config(build_config, teacher=teacher, replicas=2)
    ring = Ring(settings, ranks=[1, 1])
    await ring.begin()
    await training(ring, settings).train(batch(2))
    kinds = [entry[0] for entry in ring.log if entry[0] in ("head", "take_head", "teacher_output")]
    assert kinds == ["head", "take_head", "take_head", "teacher_output", "teacher_output"]


@pytest.mark.parametrize(
    ("teacher", "epochs", "times"),
    [("frozen", 1, 1), ("ema", 1, 2), ("live", 1, 0), ("live", 2, 2)],
)
async def test_a_frozen_head_travels_once_and_one_that_the_trainer_has_not_at_each_step(
    build_config: Any, teacher: str, epochs: int, times: int
) -> None:
    """After its first update of a step the trainer has no more the head of a live teacher."""
    settings = config(build_config, teacher=teacher, epochs=epochs)
    ring = Ring(settings, ranks=[3 * epochs])
    await ring.begin()
    trainer = training(ring, settings)
    await trainer.train(batch())
    ring.ranks[0].taken.clear()
    await trainer.train(batch(step=1))
    assert len(ring.of("head")) == len(ring.of("take_head")) == times


async def test_a_frozen_head_travels_again_to_a_trainer_that_began_again(
    build_config: Any,
) -> None:
    ring = Ring(settings := config(build_config, teacher="frozen"), ranks=[3])
    await ring.begin()
    trainer = training(ring, settings)
    await trainer.train(batch())
    ring.ranks[0].taken.clear()
    await ring.sdpo.forget()
    await trainer.train(batch(step=1))
    assert len(ring.of("forget")) == 1
    assert len(ring.of("take_head")) == 2


async def test_a_step_without_signals_asks_no_teacher(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    await ring.begin()
    await training(ring, settings).train(batch(), teacher_outputs=False)
    assert ring.of("train") == [("train", "trainer-0", 0, 0)]
    assert ring.of("teacher_output") == []


@pytest.mark.parametrize(
    "sdpo", [{"teacher": "live"}, {"teacher": "ema", "teacher_output": "full"}]
)
async def test_no_head_travels_where_the_trainer_needs_none(build_config: Any, sdpo: Any) -> None:
    ring = Ring(settings := config(build_config, **sdpo), ranks=[3])
    await ring.begin()
    await training(ring, settings).train(batch())
    assert ring.of("head") == []


async def test_a_signal_that_a_rank_refuses_is_released_and_ends_the_step(
    build_config: Any,
) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (teacher,) = await ring.begin()
    ring.ranks[0].error = ValueError("refused")
    with pytest.raises(ValueError, match="refused"):
        await training(ring, settings).train(batch())
    await ring.settle()
    assert len(teacher.held) <= 2  # those computed ahead, which the next step takes back
    assert ring.events == []


async def test_a_rank_that_dies_is_no_loss_of_a_teacher(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (teacher,) = await ring.begin()
    ring.ranks[0].block(0)
    step = asyncio.create_task(training(ring, settings).train(batch()))
    await ring.settle()
    ring.ranks[0].die()
    with pytest.raises(ActorDied, match="trainer-0 died"):
        await step
    assert teacher.alive
    assert (ring.events, ring.sdpo.restarts) == ([], 0)


async def test_a_step_that_is_cancelled_leaves_nothing_under_way(build_config: Any) -> None:
    ring = Ring(settings := config(build_config), ranks=[3])
    (teacher,) = await ring.begin()
    ring.ranks[0].block(1)
    step = asyncio.create_task(training(ring, settings).train(batch()))
    await ring.settle()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    asked = len(ring.of("teacher_output"))
    await ring.settle()
    assert len(ring.of("teacher_output")) == asked
    assert len(teacher.held) <= 1


def test_figures_of_ranks_add_up_but_for_rates_and_versions() -> None:
    ranks = [
        {"sdpo/bytes": 4.0, "sdpo/teacher_version": 3, "time/sdpo_wait_s": 1.0},
        {"sdpo/bytes": 6.0, "sdpo/teacher_version": 3, "time/sdpo_wait_s": 0.5},
        {},
    ]
    expected = {"sdpo/bytes": 10.0, "sdpo/teacher_version": 3, "time/sdpo_wait_s": 1.5}
    assert joined(ranks) == expected
    assert joined([{}, {}]) == {"sdpo/bytes": 0}
