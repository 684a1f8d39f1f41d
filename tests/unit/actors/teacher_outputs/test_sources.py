"""Where signals come from: none of another version, other views or another step is ever used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hinted
import pytest
import torch
from torch import Tensor

from composer_mesh.actors.teacher_outputs.messages import (
    HeadHandle,
    StepOver,
    TeacherOutputHandle,
    WrongVersion,
    WrongViews,
    pack,
    view_keys,
)
from composer_mesh.actors.teacher_outputs.sources import (
    InlineSource,
    LostSource,
    MeshSource,
    TeacherOutputsLost,
)
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.mesh.transport import BufferHandle
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import plan_step, split_views

VERSION = 5
VIEWS = [hinted.view(f"t{n}", context=3 + n) for n in range(4)]


class Memory:
    """A registered buffer of another process, which can be read when its gate is open."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads = 0

    def size(self) -> int:
        return self._data.numel()

    async def read_into(self, out: Tensor, timeout: int) -> None:
        self.reads += 1
        await self.gate.wait()
        out.copy_(self._data)


def config(**settings: Any) -> SdpoConfig:
    return SdpoConfig(**{"alpha": 0.5, **settings})


def batch(step: int = 0, samples: int = 4, views: Sequence[HintedView] = VIEWS) -> StepBatch:
    return hinted.batch([10] * samples, views, step=step)


async def begun(
    one: StepBatch, settings: SdpoConfig | None = None, *, teachers: int = 1, budget: int = 10
) -> MeshSource:
    """A source that expects the signals of a step; each sample has a microbatch by default."""
    source = MeshSource(settings or config())
    await source.begin(one, plan_step(one, budget)[0], teachers, VERSION)
    return source


def handle(
    views: Sequence[HintedView], value: float = 0.0, version: int = VERSION, ticket: int = 1
) -> TeacherOutputHandle:
    """States full of one value."""
    layout, packed = pack({"states": torch.full((tokens(views), 2), value)})
    buffer = BufferHandle(Memory(packed), packed.numel(), packed.dtype, (packed.numel(),))  # type: ignore[arg-type]
    return TeacherOutputHandle(version, view_keys(views), ticket, layout, buffer, 0.25)


def head(version: int, value: float = 1.0) -> HeadHandle:
    layout, packed = pack({"weight": torch.full((3, 2), value)})
    buffer = BufferHandle(Memory(packed), packed.numel(), packed.dtype, (packed.numel(),))  # type: ignore[arg-type]
    return HeadHandle(version, layout, buffer, None)


def tokens(views: Sequence[HintedView]) -> int:
    return sum(len(view.targets) for view in views)


def nothing() -> Tensor:
    raise AssertionError("nobody asks the student")


async def take(source: MeshSource, microbatch: int = 0) -> Any:
    return await asyncio.to_thread(source.take, microbatch, [], nothing)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_delivered_signal_is_taken_by_its_microbatch() -> None:
    source = await begun(batch())
    for microbatch in (0, 1):
        await source.deliver(0, microbatch, 0, handle([VIEWS[microbatch]], 10.0 + microbatch))
    for microbatch in (0, 1):
        found = await take(source, microbatch)
        assert found.tensors["states"].tolist() == [[10.0 + microbatch] * 2] * 2
        assert found.head is None


async def test_two_teachers_parts_lie_in_the_order_of_the_views() -> None:
    source = await begun(batch(), teachers=2, budget=100)
    one, two = (VIEWS[run.start : run.stop] for run in split_views(VIEWS, 2))
    await source.deliver(0, 0, 1, handle(two, 2.0))
    await source.deliver(0, 0, 0, handle(one, 1.0))
    states = (await take(source)).tensors["states"][:, 0]
    assert states.tolist() == [1.0] * tokens(one) + [2.0] * tokens(two)


async def test_a_delivery_waits_for_the_beginning_of_its_step() -> None:
    source = MeshSource(config())
    early = asyncio.create_task(source.deliver(0, 0, 0, handle([VIEWS[0]])))
    await turns()
    assert not early.done()
    await source.begin(batch(), plan_step(batch(), 10)[0], 1, VERSION)
    await early


async def test_a_delivery_waits_while_it_is_too_far_ahead_and_reads_nothing() -> None:
    source = await begun(batch())
    far = handle([VIEWS[2]])
    waiting = asyncio.create_task(source.deliver(0, 2, 0, far))
    await turns()
    assert not waiting.done()
    assert far.buffer.buffer.reads == 0  # type: ignore[union-attr]
    await source.deliver(0, 0, 0, handle([VIEWS[0]]))
    await take(source)
    await waiting


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_a_signal_of_another_version_is_refused(version: int) -> None:
    source = await begun(batch())
    with pytest.raises(WrongVersion, match=f"is of version {version} but the trainer is at 5: let"):
        await source.deliver(0, 0, 0, handle([VIEWS[0]], version=version))


@pytest.mark.parametrize("views", [[VIEWS[1]], [VIEWS[0], VIEWS[1]], []])
async def test_a_signal_about_other_views_is_refused(views: list[HintedView]) -> None:
    source = await begun(batch())
    with pytest.raises(
        WrongViews, match=r"microbatch 0, teacher 0 is about .* not t0:0: plan both"
    ):
        await source.deliver(0, 0, 0, handle(views))


async def test_a_signal_for_a_step_that_is_over_is_refused() -> None:
    source = await begun(batch(step=3))
    with pytest.raises(StepOver, match="step 3 is over"):
        await source.deliver(2, 0, 0, handle([VIEWS[0]]))
    with pytest.raises(StepOver):
        await source.choice(2, 0, 0)
    with pytest.raises(StepOver):
        await source.lose(2, "late")


async def test_a_late_delivery_of_an_old_step_never_reaches_a_new_one() -> None:
    """Neither one that is being read when the step begins nor one that waits for room."""
    source = await begun(batch())
    reading, waiting = handle([VIEWS[0]], 1.0), handle([VIEWS[2]], 1.0)
    reading.buffer.buffer.gate.clear()  # type: ignore[union-attr]
    late = [
        asyncio.create_task(source.deliver(0, 0, 0, reading)),
        asyncio.create_task(source.deliver(0, 2, 0, waiting)),
    ]
    await turns()
    await source.lose(0, "the teacher is gone")
    await source.begin(batch(step=1), plan_step(batch(step=1), 10)[0], 1, VERSION)
    reading.buffer.buffer.gate.set()  # type: ignore[union-attr]
    over, lost = await asyncio.gather(*late, return_exceptions=True)
    assert isinstance(over, StepOver)
    assert isinstance(lost, TeacherOutputsLost)
    assert source.figures()["sdpo/bytes"] == 0
    await source.deliver(1, 0, 0, handle([VIEWS[0]], 2.0))
    assert (await take(source)).tensors["states"].unique().tolist() == [2.0]


async def test_a_lost_step_is_lost_for_the_thread_that_waits() -> None:
    source = await begun(batch())
    taking = asyncio.create_task(take(source))
    await turns()
    await source.lose(0, "no more")
    with pytest.raises(TeacherOutputsLost, match="no more"):
        await taking


@pytest.mark.parametrize("kind", ["ema", "trust_region", "frozen"])
async def test_hidden_states_come_with_the_head_of_their_version(kind: str) -> None:
    source = await begun(batch(), config(teacher=kind))
    await source.take_head(head(VERSION, 7.0))
    await source.deliver(0, 0, 0, handle([VIEWS[0]]))
    found = await take(source)
    assert found.head.weight.unique().tolist() == [7.0]
    assert found.head.bias is None


async def test_a_live_teachers_head_comes_with_its_states_where_updates_move_the_trainers() -> None:
    source = MeshSource(config(), updates=2)
    await source.begin(batch(), plan_step(batch(), 10)[0], 1, VERSION)
    with pytest.raises(WrongVersion):
        await source.deliver(0, 0, 0, handle([VIEWS[0]]))
    await source.take_head(head(VERSION, 7.0))
    await source.deliver(0, 0, 0, handle([VIEWS[0]]))
    assert (await take(source)).head.weight.unique().tolist() == [7.0]


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
async def test_the_head_of_another_version_is_refused(kind: str) -> None:
    source = await begun(batch(), config(teacher=kind))
    for version in (None, VERSION - 1):
        if version is not None:
            await source.take_head(head(version))
        with pytest.raises(WrongVersion):
            await source.deliver(0, 0, 0, handle([VIEWS[0]]))


async def test_a_frozen_teachers_head_serves_every_version() -> None:
    source = await begun(batch(), config(teacher="frozen"))
    await source.take_head(head(0, 7.0))
    await source.deliver(0, 0, 0, handle([VIEWS[0]]))
    assert (await take(source)).head.weight.unique().tolist() == [7.0]


async def test_states_keep_the_head_with_which_they_came() -> None:
    """A replacement whose average began again brings another head for what it sends itself."""
    source = await begun(batch(), config(teacher="ema"))
    for microbatch, value in enumerate((1.0, 2.0)):
        await source.take_head(head(VERSION, value))
        await source.deliver(0, microbatch, 0, handle([VIEWS[microbatch]]))
    heads = [(await take(source, microbatch)).head for microbatch in (0, 1)]
    assert [one.weight.unique().tolist() for one in heads] == [[1.0], [2.0]]


async def test_teachers_with_different_averages_share_no_microbatch() -> None:
    source = await begun(batch(), config(teacher="ema"), teachers=2, budget=100)
    one, two = (VIEWS[run.start : run.stop] for run in split_views(VIEWS, 2))
    await source.take_head(head(VERSION, 1.0))
    await source.deliver(0, 0, 0, handle(one))
    await source.take_head(head(VERSION, 1.5))
    with pytest.raises(RuntimeError, match=r"microbatch 0 have different averages.*when_lost"):
        await source.deliver(0, 0, 1, handle(two))
    await source.take_head(head(VERSION, 1.0))  # one that was adopted from a survivor
    await source.deliver(0, 0, 1, handle(two))
    await take(source)


async def test_each_teacher_gets_its_rows_of_the_students_choice() -> None:
    asking = config(teacher_output="topk", top_k_choice="student")
    source = await begun(batch(), asking, teachers=2, budget=100)
    parts = [asyncio.create_task(source.choice(0, 0, part)) for part in (0, 1)]
    ids = torch.zeros(tokens(VIEWS), 0, dtype=torch.int32)  # nothing that has to be registered
    taking = asyncio.create_task(asyncio.to_thread(source.take, 0, VIEWS, lambda: ids))
    shapes = [(await part).shape for part in parts]
    runs = split_views(VIEWS, 2)
    assert shapes == [(tokens(VIEWS[run.start : run.stop]), 0) for run in runs]
    await source.lose(0, "enough")
    with pytest.raises(TeacherOutputsLost):
        await taking


async def test_figures_count_bytes_and_the_teachers_time_of_one_step() -> None:
    source = await begun(batch())
    one = handle([VIEWS[0]])
    await source.deliver(0, 0, 0, one)
    await take(source)
    figures = source.figures()
    assert figures["sdpo/bytes"] == one.buffer.nbytes == 2 * 2 * 4
    assert figures["sdpo/bytes_per_token"] == one.buffer.nbytes / tokens(VIEWS)
    assert figures["sdpo/teacher_version"] == VERSION
    assert figures["time/sdpo_teacher_s"] == 0.25
    await source.begin(batch(step=1), plan_step(batch(step=1), 10)[0], 1, VERSION + 1)
    assert source.figures()["sdpo/bytes"] == 0


async def test_a_rank_without_views_expects_nothing() -> None:
    source = await begun(batch(views=[]))
    assert source.figures()["sdpo/bytes_per_token"] == 0


def test_where_no_teacher_lives_every_signal_is_lost() -> None:
    with pytest.raises(TeacherOutputsLost, match="no SDPO teacher is alive"):
        LostSource().take(0, VIEWS, nothing)
    assert LostSource().figures() == {"sdpo/bytes": 0}


def test_an_inline_teacher_of_another_version_is_refused(build_model: Any) -> None:
    teacher = TeacherModel(build_model(1), config(placement="inline"), 512, follows=True)
    with pytest.raises(WrongVersion, match="is of version 0 but the trainer is at 1"):
        InlineSource(teacher, config(), 1)


def test_an_inline_teacher_asks_the_student_where_the_config_says_so(build_model: Any) -> None:
    asking = config(teacher_output="topk", top_k=2, top_k_choice="student", placement="inline")
    teacher = TeacherModel(build_model(1), asking, 512, follows=True)
    chosen = torch.tensor([[4, 9], [9, 4]], dtype=torch.int32)
    source = InlineSource(teacher, asking, 0)
    assert torch.equal(source.take(0, VIEWS[:1], lambda: chosen).tensors["ids"], chosen)
    with pytest.raises(AssertionError, match="nobody asks"):
        source.take(0, VIEWS[:1], nothing)
    assert source.figures()["sdpo/bytes"] == 0
