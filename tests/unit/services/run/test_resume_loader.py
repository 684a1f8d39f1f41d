"""A run directory read back: what is whole is taken, what is damaged is set aside and said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from slow_file import SlowFile

from composer_mesh.actors.checkpoints.folder import CheckpointDraft, folder_of
from composer_mesh.actors.checkpoints.manifest import MANIFEST_FILE, write_manifest, written
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.replay.teacher_queries import TeacherQueryRecord, query_record_to_json
from composer_mesh.services.run.resume_loader import (
    ResumeContents,
    load_resume_state,
    restore_teacher_queries,
    resume_state_of,
    trained_steps,
)
from composer_mesh.services.schedule.step_builder import Group, PlannedStep
from composer_mesh.services.steps.hint_writing import WrittenHints, worded_to_json
from composer_mesh.services.steps.step_manifest import ReplayOutcome, StepManifest, manifest_to_json
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.writing import RunStore

PROMPTS, DONE, AHEAD = 2, 3, 2
Events = list[tuple[str, str]]


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(run={"name": "unit", "seed": 3, "steps": 9}, late_rewards={"max_age": 2})


def group_of(group: int, version: int) -> list[Trace]:
    turn = Turn([1, 2], [3], [-0.5], [version], "stop")
    name = f"train-{group:06d}-000"
    return [Trace(name, group, 0, "toolbox", "train", group, [turn], [], 1.0, True, [])]


@contextmanager
def opened(root: Path, config: Config) -> Iterator[RunStore]:
    with RunStore(root, config) as store:
        yield store


async def filled(store: RunStore, planned: bool = False) -> None:
    """A run of some steps, whose rollouts of two steps more are there but for one group."""
    for step in range(DONE + AHEAD):
        groups = range(step * PROMPTS, (step + 1) * PROMPTS)
        for group in groups:
            store.enter(group, max(0, step - 1))
            if group < (DONE + AHEAD) * PROMPTS - 1:
                await store.add_group(group, group_of(group, max(0, step - 1)))
        if step < DONE + planned:
            manifest = StepManifest(step, tuple(groups))
            await store.plan_step(step, list(groups), manifest_to_json(manifest))
        if step < DONE:
            await store.end_step(step, {"step": step + 1})


async def looked(root: Path, config: Config) -> tuple[ResumeContents, Events]:
    events: Events = []

    def record(kind: str, actor: str, detail: str, /, **_: Any) -> None:
        events.append((kind, detail))

    with opened(root, config) as store:
        past = await load_resume_state(store, config, record)
    return past, events


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


async def test_done_steps_the_planned_one_and_finished_groups_are_there(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled(store, planned=True)
        await store.add_worded(8, worded_to_json(WrittenHints({}, 2, 0.5)))
    past, events = await looked(tmp_path, config)
    assert (past.steps, past.checkpoint, events) == (DONE, None, [])
    assert [(manifest.step, metrics["step"]) for manifest, metrics in past.again] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    assert past.planned is not None
    assert past.planned.groups == (6, 7)
    assert sorted(past.waiting) == [8]
    assert past.waiting[8].traces == group_of(8, 3)
    assert past.waiting[8].worded == WrittenHints({}, 2, 0.5)
    assert [group.traces for group in past.groups_of(past.planned)] == [
        group_of(6, 2),
        group_of(7, 2),
    ]


async def test_a_run_that_has_not_done_anything_has_no_past(tmp_path: Path, config: Config) -> None:
    with opened(tmp_path, config):
        pass
    assert await looked(tmp_path, config) == (ResumeContents(), [])


async def test_a_damaged_group_that_no_step_has_taken_is_set_aside_and_nothing_else(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled(store)
    flip(path_of(tmp_path, 7))
    past, _ = await looked(tmp_path, config)
    assert sorted(past.waiting) == [6, 8]
    assert past.steps == DONE
    assert not path_of(tmp_path, 7).exists()
    assert list((tmp_path / "quarantine").rglob("*000007*"))


async def test_a_damaged_group_that_must_be_trained_again_takes_the_run_back_before_its_step(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled(store)
    flip(path_of(tmp_path, 3))
    past, events = await looked(tmp_path, config)
    assert past.steps == 1
    assert [manifest.step for manifest, _ in past.again] == [0]
    assert any(kind == "steps_superseded" and "step 2" in detail for kind, detail in events)
    # Group 3 is lost; those of versions above 1 do not count any more.
    assert sorted(past.waiting) == [2, 4, 5]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


async def test_steps_are_read_once_and_in_order_or_the_run_is_refused(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled(store)
        manifest = manifest_to_json(StepManifest(7, ()))
        await store.plan_step(7, [], manifest)
    with pytest.raises(RunDirectoryError, match="must have each once, in order"):
        await looked(tmp_path, config)


async def test_a_damaged_checkpoint_is_set_aside_and_more_steps_are_trained_again(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled(store)
    for step in (1, 3):
        folder = folder_of(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"12345678")
        write_manifest(folder, step, written(folder, [folder / "weights"]))
    flip(folder_of(tmp_path, 3) / "weights")
    past, events = await looked(tmp_path, config)
    assert past.checkpoint is not None
    assert past.checkpoint.step == 1
    assert [manifest.step for manifest, _ in past.again] == [1, 2]
    assert [manifest.step for manifest in past.known] == [0]
    assert any(kind == "quarantined" and "checkpoint of step 3" in told for kind, told in events)


class Stream:
    """A pair stream that is told what was asked, and of the groups that were not."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.entered: list[tuple[str, int]] = []

    def restore(
        self, asked: Iterable[TeacherQueryRecord], taken: int, carried: Sequence[int]
    ) -> int:
        self.asked = [group.group_id for group in asked]
        known = {*self.asked, *carried}
        return next(n for n in count() if n not in known)

    def begin(self, group: Sequence[Trace]) -> None:
        self.entered.append(("begin", group[0].group_id))

    def skip(self, group_id: int) -> None:
        self.entered.append(("skip", group_id))


async def test_teachers_are_asked_about_trained_groups_that_they_were_not_asked_about(
    tmp_path: Path, config: Config
) -> None:
    stream: Any = Stream()
    with opened(tmp_path, config) as store:
        await filled(store)
        for group in range(2):
            asked = TeacherQueryRecord(group, [], ReplayOutcome(), [])
            await store.add_teacher_queries(group, query_record_to_json(asked, []), [])
        flip(path_of(tmp_path, 4))
        restore_teacher_queries(ResumeContents(), stream, store.reading, DONE * PROMPTS)
    assert stream.asked == [0, 1]
    assert stream.entered == [("begin", 2), ("begin", 3), ("skip", 4), ("begin", 5)]


async def filled_with_drops(store: RunStore) -> None:
    """Two steps that took three groups each and trained two; two groups more are finished."""
    for group in range(8):
        store.enter(group, 0)
        await store.add_group(group, group_of(group, 0))
    for step, dropped in enumerate((1, 5)):
        taken = range(3 * step, 3 * step + 3)
        kept = tuple(group for group in taken if group != dropped)
        manifest = StepManifest(step, kept, dropped=(dropped,))
        await store.plan_step(step, kept, manifest_to_json(manifest))
    await store.end_step(0, {"step": 1})


async def test_a_group_that_a_step_has_dropped_neither_waits_nor_is_sampled_again(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled_with_drops(store)
    past, events = await looked(tmp_path, config)
    assert (past.steps, past.next_group, events) == (1, 6, [])
    assert past.planned is not None
    assert (past.planned.groups, past.planned.dropped) == ((3, 4), (5,))
    assert sorted(past.waiting) == [6, 7]
    assert past.sizes == [1, 1, 1]
    state = resume_state_of(past, Composing())  # type: ignore[arg-type]
    assert (state.next_group, sorted(state.groups)) == (6, [6, 7])


async def test_the_groups_of_a_step_that_is_trained_anew_wait_again_with_those_it_dropped(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled_with_drops(store)
    flip(path_of(tmp_path, 3))
    past, events = await looked(tmp_path, config)
    assert (past.steps, past.next_group, past.planned) == (1, 3, None)
    assert sorted(past.waiting) == [4, 5, 6, 7]
    assert any(kind == "steps_superseded" for kind, _ in events)


async def test_a_damaged_group_that_a_step_has_dropped_takes_no_step_back(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled_with_drops(store)
    flip(path_of(tmp_path, 1))
    past, _ = await looked(tmp_path, config)
    assert (past.steps, past.next_group, sorted(past.waiting)) == (1, 6, [6, 7])


async def test_teachers_are_not_asked_about_groups_that_a_step_has_dropped(
    tmp_path: Path, config: Config
) -> None:
    stream: Any = Stream()
    with opened(tmp_path, config) as store:
        await filled_with_drops(store)
        past = ResumeContents(next_group=6)
        restore_teacher_queries(past, stream, store.reading, 2 * PROMPTS)
    told = [("skip" if group in (1, 5) else "begin", group) for group in range(6)]
    assert stream.entered == told


async def filled_with_holes(store: RunStore) -> None:
    """Two steps that passed over the groups 1 and 2, of which 2 is finished; group 6 is too."""
    for group in range(7):
        store.enter(group, 0)
        if group != 1:
            await store.add_group(group, group_of(group, 0))
    for step, groups in enumerate(((4, 5), (0, 3))):
        await store.plan_step(step, groups, manifest_to_json(StepManifest(step, groups)))
        await store.end_step(step, {"step": step + 1})


async def test_groups_that_were_passed_over_wait_if_they_are_finished_and_enter_again(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled_with_holes(store)
    past, events = await looked(tmp_path, config)
    assert (past.steps, past.next_group, past.carried, events) == (2, 6, [1, 2], [])
    assert sorted(past.waiting) == [2, 6]
    assert [manifest.groups for manifest, _ in past.again] == [(4, 5), (0, 3)]
    state = resume_state_of(past, Composing())  # type: ignore[arg-type]
    assert (state.next_group, state.carried, sorted(state.groups)) == (6, [1, 2], [2, 6])


async def test_teachers_are_not_asked_before_they_enter_about_groups_that_were_passed_over(
    tmp_path: Path, config: Config
) -> None:
    stream: Any = Stream()
    with opened(tmp_path, config) as store:
        await filled_with_holes(store)
        past = ResumeContents(next_group=6, carried=[1, 2])
        restore_teacher_queries(past, stream, store.reading, 2 * PROMPTS)
    assert stream.entered == [("begin", group) for group in (0, 3, 4, 5)]


async def test_teachers_are_asked_once_about_groups_after_one_whose_answers_were_not_stored(
    tmp_path: Path, config: Config
) -> None:
    """Group 3 was passed over and then taken; its answers came after those about 4 and 5."""
    stream: Any = Stream()
    with opened(tmp_path, config) as store:
        await filled_with_holes(store)
        for group in (0, 4, 5):
            asked = TeacherQueryRecord(group, [], ReplayOutcome(), [])
            await store.add_teacher_queries(group, query_record_to_json(asked, []), [])
        past = ResumeContents(next_group=6, carried=[1, 2])
        restore_teacher_queries(past, stream, store.reading, 2 * PROMPTS)
    assert stream.asked == [0, 4, 5]
    assert stream.entered == [("begin", 3)]


async def test_a_step_that_is_trained_anew_takes_from_groups_that_it_had_passed_over(
    tmp_path: Path, config: Config
) -> None:
    with opened(tmp_path, config) as store:
        await filled_with_holes(store)
    flip(path_of(tmp_path, 3))
    past, _ = await looked(tmp_path, config)
    assert (past.steps, past.next_group, past.carried) == (1, 6, [0, 1, 2, 3])
    assert sorted(past.waiting) == [0, 2, 6]


class Composing:
    """Stands for a composer: what it was told to remember, and to make again, of which rollouts."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def remember(self, manifest: StepManifest, groups: Sequence[Group]) -> None:
        del groups
        self.known.append(manifest.step)

    def again(
        self, manifest: StepManifest, groups: Sequence[Group], pairs: Sequence[PreferencePair]
    ) -> PlannedStep:
        del pairs
        traces = [trace for group in groups for trace in group.traces]
        return PlannedStep(StepBatch(manifest.step, [], [], []), traces, None, Corrections())


@pytest.mark.parametrize(("first", "until", "known"), [(0, 3, []), (1, 2, [0]), (2, 3, [0, 1])])
async def test_done_steps_are_made_again_for_a_trainer_that_lost_a_checkpoint(
    tmp_path: Path, config: Config, first: int, until: int, known: list[int]
) -> None:
    step_builder: Any = Composing()
    with opened(tmp_path, config) as store:
        await filled(store, planned=True)
        found = trained_steps(store.reading, config, step_builder, first, until)
    steps = [(one.batch.step, one.metrics["step"]) for one in found]
    assert steps == [(step, step + 1) for step in range(first, until)]
    assert step_builder.known == known


async def test_a_done_step_whose_rollouts_are_damaged_is_not_made_again(
    tmp_path: Path, config: Config
) -> None:
    step_builder: Any = Composing()
    with opened(tmp_path, config) as store:
        await filled(store)
        flip(path_of(tmp_path, 3))
        with pytest.raises(RunDirectoryError, match=r"step 2 cannot be trained again .*--resume"):
            trained_steps(store.reading, config, step_builder, 0, 3)
        assert len(trained_steps(store.reading, config, step_builder, 2, 3)) == 1


async def test_the_event_loop_goes_on_while_a_checkpoint_is_checked(
    tmp_path: Path, config: Config
) -> None:
    """A silent controller would lose the hosts that it has attached."""
    with opened(tmp_path, config) as store:
        await filled(store)
    draft = CheckpointDraft(tmp_path, DONE)
    (draft.folder / "state").write_bytes(b"weights")
    checkpoint = draft.commit(written(draft.folder, [draft.folder / "state"]))
    file = SlowFile(checkpoint.folder / MANIFEST_FILE)
    looking = asyncio.create_task(looked(tmp_path, config))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(file.turned)
    past, _ = await looking
    assert past.checkpoint == checkpoint
    assert not file.late
