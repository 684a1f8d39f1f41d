"""Loads the resume state of a run directory whose controller has ended.

    newest intact checkpoint c     steps c .. s-1 are done: their batches are rebuilt
    manifests of steps             step s, if planned, is trained from its manifest
    finished groups                wait for the window, and are not sampled again
    queries, pairs, hints, rewards   the state of teacher replay and late rewards

Damaged data is quarantined, never used: an untaken group is sampled again, and steps from the first
one that cannot be rebuilt on are superseded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.rollouts.curriculum import GroupResult
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.replay.teacher_queries import query_record_from_json
from composer_mesh.services.schedule.groups import ResumeState, StoredGroup
from composer_mesh.services.schedule.step_builder import Group, StepBuilder
from composer_mesh.services.steps.hint_writing import WrittenHints, worded_from_json
from composer_mesh.services.steps.logprob_mismatch import Trained
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import (
    DamagedRecord,
    GroupRow,
    GroupState,
    StepRow,
    Where,
)
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.checkpoint_writes import newest_undamaged

STALE = "it was sampled by a version that no longer counts"


@dataclass(frozen=True)
class ResumeContents:
    """The intact contents of a run directory that a resumed run needs.

    `again` are the finished steps since the checkpoint, in order, `known` earlier ones that late
    rewards may still correct. `groups` are those of all these steps and of the `planned` one;
    `waiting` are those that no step has taken. `taken` counts groups whose teacher queries are
    settled. `sizes` are those of the last step's groups. `next_group` is the first group such that
    no step has taken it or a later one; `carried` are the earlier ones that none has taken.
    `results` are what the groups of each step have measured, for a curriculum.
    """

    checkpoint: Checkpoint | None = None
    steps: int = 0
    again: list[tuple[StepManifest, dict[str, Any]]] = field(default_factory=list)
    known: list[StepManifest] = field(default_factory=list)
    planned: StepManifest | None = None
    groups: dict[int, StoredGroup] = field(default_factory=dict)
    waiting: dict[int, StoredGroup] = field(default_factory=dict)
    pairs: Mapping[str, PreferencePair] = field(default_factory=dict)
    taken: int = 0
    sizes: list[int] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    poisoned: list[dict[str, Any]] = field(default_factory=list)
    next_group: int = 0
    carried: list[int] = field(default_factory=list)
    results: list[tuple[int, Sequence[GroupResult]]] = field(default_factory=list)

    def groups_of(self, manifest: StepManifest) -> list[Group]:
        """Return the groups that a step was built from."""
        found = [(group_id, self.groups[group_id]) for group_id in manifest.groups]
        return [Group(n, one.traces, one.worded or WrittenHints()) for n, one in found]

    def pairs_of(self, manifest: StepManifest) -> list[PreferencePair]:
        """Return the pairs of a step."""
        return [self.pairs[pair_id] for pair_id in manifest.pairs]


class _Lost(Exception):
    """Data that cannot be read: the step and group it belongs to, and why."""

    def __init__(self, step: int | None, group_id: int | None, why: str) -> None:
        super().__init__(step, group_id, why)
        self.step, self.group_id, self.why = step, group_id, why


async def load_resume_state(store: RunStore, config: Config, record: Recorder) -> ResumeContents:
    """Load a claimed run directory; quarantine and `record` what is damaged.

    Reads every byte of the newest checkpoint, and all needed groups, in a thread: attached hosts
    take an unresponsive event loop for a lost controller.

    Raises RunDirectoryError if store and checkpoints belong to different runs.
    """
    checkpoint = await newest_undamaged(store.root.absolute(), record)
    while True:
        try:
            return await in_thread(_read, store.reading, config, checkpoint)
        except _Lost as lost:
            if lost.group_id is not None:
                await store.quarantine(lost.group_id, lost.why)
            if lost.step is not None:
                await _go_back(store, lost.step, lost.why, record)


def resume_state_of(past: ResumeContents, step_builder: StepBuilder) -> ResumeState:
    """Return the controller's resume state; registers its steps with the step builder."""
    for manifest in past.known:
        step_builder.remember(manifest, past.groups_of(manifest))
    again = [
        Trained(step_builder.again(one, past.groups_of(one), past.pairs_of(one)).batch, metrics)
        for one, metrics in past.again
    ]
    planned = None
    if (one := past.planned) is not None:
        planned = step_builder.again(one, past.groups_of(one), past.pairs_of(one))
    return ResumeState(
        past.steps,
        past.checkpoint,
        again,
        planned,
        past.waiting,
        list(past.evaluations),
        past.next_group,
        past.carried,
    )


def trained_steps(
    reader: RunReader, config: Config, step_builder: StepBuilder, first: int, until: int
) -> list[Trained]:
    """Rebuild the finished steps from `first` up to before `until` with a new step builder.

    Raises RunDirectoryError if one cannot be rebuilt.
    """
    done = [row for row in reader.steps() if row.metrics is not None]
    stored = {row.group_id: row for row in reader.groups()}
    try:
        again = [(_manifest(row), row.metrics or {}) for row in done[first:until]]
        groups = _needed(reader, stored, [manifest for manifest, _ in again])
    except _Lost as lost:
        raise RunDirectoryError(
            f"step {(lost.step or 0) + 1} cannot be trained again ({lost.why}): continue with "
            "--resume, which trains it and those after it anew"
        ) from None
    known = list(_known(reader, done, first, config.late_rewards.max_age, groups))
    pairs = _pairs(reader) if config.replay.on else {}
    past = ResumeContents(again=again, known=known, groups=groups, pairs=pairs)
    return resume_state_of(past, step_builder).past


def restore_teacher_queries(
    past: ResumeContents, stream: PairStream, reader: RunReader, first: int
) -> None:
    """Restore a stream's query records, and query unqueried groups before `first`.

    Groups before `past.next_group` count as well; those that a step has dropped are not queried,
    and those that are carried enter again. A step may have taken a group that it had passed over
    before the group's record was stored, but after later ones were.
    """
    stored = {row.group_id for row in reader.teacher_queries()}
    before = min(past.next_group, max(stored, default=0))
    late = sorted(set(range(before)).difference(stored, past.carried))
    records = (
        query_record_from_json(row.group_id, row.body, past.pairs)
        for row in reader.teacher_queries()
    )
    dropped = {row.group_id for row in reader.groups(GroupState.FINISHED)}
    begin = stream.restore(records, past.taken, [*past.carried, *late])
    for group_id in [*late, *range(begin, max(first, past.next_group))]:
        if group_id in past.carried:
            continue
        if group_id not in dropped and (traces := _traces(reader, group_id)):
            stream.begin(traces)
        else:
            stream.skip(group_id)


async def _go_back(store: RunStore, step: int, why: str, record: Recorder) -> None:
    """Supersede the steps from `step` on, and quarantine rollouts of later versions."""
    await store.supersede(step)
    record("steps_superseded", "", f"step {step + 1} and those after it are trained anew: {why}")
    rows = list(store.reading.rows(Where(state=GroupState.FINISHED)))
    for group_id in sorted({row.group_id for row in rows if (row.newest_version or 0) > step}):
        await store.quarantine(group_id, STALE)


def _read(reader: RunReader, config: Config, checkpoint: Checkpoint | None) -> ResumeContents:
    rows, first = list(reader.steps()), checkpoint.step if checkpoint else 0
    done = [row for row in rows if row.metrics is not None]
    _check_order(rows, len(done), first)
    stored = {row.group_id: row for row in reader.groups()}
    every = [_manifest(row) for row in rows]
    again = [(one, row.metrics or {}) for one, row in zip(every, done, strict=False)][first:]
    groups = _needed(reader, stored, every[first:])
    known = list(_known(reader, done, first, config.late_rewards.max_age, groups))
    last = every[-1] if every else None
    taken = {group_id for manifest in every for group_id in manifest.taken_groups}
    next_group = max(taken, default=-1) + 1
    return ResumeContents(
        checkpoint,
        len(done),
        again,
        known,
        every[len(done)] if len(every) > len(done) else None,
        groups,
        {
            n: _waiting(reader, row)
            for n, row in stored.items()
            if row.state == GroupState.FINISHED and n not in taken
        },
        _pairs(reader) if config.replay.on else {},
        last.taken.asked if last and last.taken else 0,
        [stored[n].traces for n in last.taken_groups] if last else [],
        reader.evaluations(),
        reader.poisoned(),
        next_group,
        sorted(set(range(next_group)) - taken),
        [(one.step, one.results) for one in every] if config.data.curriculum else [],
    )


def _check_order(rows: list[StepRow], done: int, first: int) -> None:
    steps = [row.step for row in rows]
    if steps != list(range(len(rows))) or len(rows) > done + 1:
        raise RunDirectoryError(
            f"run.sqlite has the steps {steps[-3:]} at its end but must have each once, in order: "
            "take it from a copy of the run"
        )
    if first > done:
        raise RunDirectoryError(
            f"the newest checkpoint is of step {first} but run.sqlite has {done} steps: they are "
            "of different runs, so move the checkpoints that are newer away"
        )


def _manifest(row: StepRow) -> StepManifest:
    return manifest_from_json(row.step, row.manifest)


def _needed(
    reader: RunReader, stored: Mapping[int, GroupRow], manifests: Iterable[StepManifest]
) -> dict[int, StoredGroup]:
    """Read the groups that steps are rebuilt from."""
    found: dict[int, StoredGroup] = {}
    for manifest in manifests:
        for group_id in manifest.groups:
            if stored[group_id].state == GroupState.DAMAGED:
                raise _Lost(manifest.step, None, f"the rollouts of its group {group_id} are lost")
            try:
                found[group_id] = _stored(reader, group_id)
            except DamagedRecord as damaged:
                raise _Lost(manifest.step, group_id, damaged.why) from None
    return found


def _waiting(reader: RunReader, row: GroupRow) -> StoredGroup:
    """Read a finished group that no step has taken."""
    try:
        return _stored(reader, row.group_id)
    except DamagedRecord as damaged:
        raise _Lost(None, row.group_id, damaged.why) from None


def _stored(reader: RunReader, group_id: int) -> StoredGroup:
    worded = reader.hint_writer_output(group_id)
    traces = reader.traces(group_id)
    return StoredGroup(traces, None if worded is None else worded_from_json(worded))


def _known(
    reader: RunReader,
    done: list[StepRow],
    first: int,
    max_age: int,
    groups: dict[int, StoredGroup],
) -> Iterator[StepManifest]:
    """Steps before the checkpoint that late rewards may correct and that are readable."""
    for row in done[max(0, first - max_age) : first] if max_age else ():
        manifest = _manifest(row)
        try:
            groups |= {group_id: _stored(reader, group_id) for group_id in manifest.groups}
        except DamagedRecord:
            continue  # a reward for one of its rollouts expires, which is reported
        yield manifest


def _pairs(reader: RunReader) -> dict[str, PreferencePair]:
    return {row.pair_id: stored_pair(row) for row in reader.pairs()}


def _traces(reader: RunReader, group_id: int) -> list[Trace]:
    """Return the rollouts of a trained group; none if they are unreadable."""
    try:
        return reader.traces(group_id)
    except DamagedRecord:
        return []
