"""The writer of a run directory: what a run produces is kept before anything is made of it.

    enter, add_event, add_evaluation, add_poisoned    queued, in order; nobody waits
    await add_group, add_asked, plan_step, ...        on the disk when they return

A thread writes, so the event loop is never blocked. Errors of what was queued end the run at the
next awaited call. What the rows say is read through `reading`, also while the run goes on.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.poison import PoisonedInput
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import EVALUATIONS_FILE, METRICS_FILE, Evaluation
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.lines import Lines
from composer_mesh.services.store.migration import migrate
from composer_mesh.services.store.opening import Moved, move_file, repair_on_open
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.records import RunRecords
from composer_mesh.services.store.whole_files import write_whole
from composer_mesh.services.store.writer_thread import WriterThread

EVENTS_FILE = "events.jsonl"
POISONED_FILE = "poisoned.jsonl"


class RunStore:
    """One run's directory, as a context manager. Other processes read beside it."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root
        (root / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._bytes = 0
        self._lines, self._records = Lines(root), RunRecords(root)
        self.reading = RunReader(root)
        try:
            self._open(config)
        except BaseException:
            self._close()
            raise
        self._thread = WriterThread(self._lines.sync)

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            self._thread.close()
        except Exception:
            if error is None:
                raise
        finally:
            self._close()

    def enter(self, group_id: int, version: int) -> None:
        """A group enters the window, for the first time or again, when `version` is served."""
        self._thread.tell(partial(self._records.enter, group_id, version))

    def add_event(
        self,
        kind: str,
        actor: str = "",
        detail: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """One lifecycle or supervision event, with the wall clock in seconds since 1970.

        `fields` are what programs read of it: kind, host, rank, cause, class, generation.
        """
        line = event_line(kind, actor, detail, fields)
        self._thread.tell(partial(self._lines.add, EVENTS_FILE, line))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """One held-out evaluation, of the policy after so many steps."""
        body = _json(dataclasses.asdict(evaluation))
        self._thread.tell(partial(self._records.add_evaluation, evaluation.step, body))
        self._thread.tell(partial(self._lines.add, EVALUATIONS_FILE, body))

    def add_poisoned(self, poisoned: PoisonedInput) -> None:
        """One episode that was set aside because it failed again and again in the same way."""
        body = _json(dataclasses.asdict(poisoned))
        self._thread.tell(partial(self._records.add_poisoned, body))
        self._thread.tell(partial(self._lines.add, POISONED_FILE, body))

    async def add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]:
        """Keep a finished group, unless it is there already; returns what is kept."""
        return await self._thread.call(partial(self._add_group, group_id, traces))

    async def add_worded(self, group_id: int, worded: bytes) -> None:
        """Keep what the hint writer said about a group."""
        await self._thread.call(partial(self._records.add_worded, group_id, worded))

    async def add_teacher_queries(
        self, group_id: int, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]:
        """Keep what asking about a group came to, with its pairs; returns the fresh ones."""
        return await self._thread.call(
            partial(self._records.add_teacher_queries, group_id, body, pairs)
        )

    async def take_pairs(
        self, step: int, max_age: int, limit: int
    ) -> tuple[list[PreferencePair], int]:
        """The oldest waiting pairs that a step may train, and how many have become too old.

        Changes nothing: `plan_step` says what the step took.
        """
        return await self._thread.call(partial(self._records.take_pairs, step, max_age, limit))

    async def plan_step(
        self,
        step: int,
        groups: Sequence[int],
        manifest: bytes,
        pairs: Sequence[str] = (),
        max_age: int | None = None,
        rewards: Mapping[int, str] | None = None,
    ) -> None:
        """Write down, before step `step` (from 0) is trained, what it takes; all of it or nothing.

        Groups are trained with it and pairs by their ids; waiting pairs that are older than
        `max_age` expire. `rewards` has what became of late ones by place: trained or expired.
        Raises ValueError where a group is not finished, or where a pair does not wait.
        """
        plan = partial(self._records.plan_step, step, list(groups), manifest, list(pairs))
        await self._thread.call(partial(plan, max_age, dict(rewards or {})))

    async def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a planned step; one that has some keeps those."""
        await self._thread.call(partial(self._end_step, step, _json(metrics)))

    async def supersede(self, step: int) -> None:
        """This step and later ones count no more; what they took waits again."""
        await self._thread.call(partial(self._supersede, step))

    async def quarantine(self, group_id: int, why: str) -> None:
        """Move a damaged file of a group away: it is sampled again, unless it was trained."""
        await self._thread.call(partial(self._quarantine, group_id, why))

    def waits(self) -> dict[str, float]:
        """Figures since the last call: seconds that calls waited, bytes written, longest queue."""
        waits, queue = self._thread.waits()
        written, self._bytes = self._bytes, 0
        return {
            "store/wait_p50_s": _quantile(waits, 0.5),
            "store/wait_p99_s": _quantile(waits, 0.99),
            "store/bytes": float(written),
            "store/queue": float(queue),
        }

    def _open(self, config: Config) -> None:
        """Bring the directory in order: an older run, what a stop left, damage, copies."""
        write_whole(self.root / "config.toml", dump_toml(config).encode())
        if moved := migrate(self.root, self._records, config.schedule.prompts_per_step):
            self._note("run_migrated", f"{', '.join(moved)}: now in run.sqlite, kept in migrated/")
        for one in repair_on_open(self.root, self._records, self.reading):
            self._note_moved(one)
        self._copy()

    def _close(self) -> None:
        self.reading.close()
        self._lines.close()
        self._records.close()

    def _add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]:
        kept = self._records.stored(group_id)
        if kept is not None:
            return kept
        self._bytes += self._records.add_group(group_id, traces)
        return list(traces)

    def _quarantine(self, group_id: int, why: str) -> None:
        self._records.forget_group(group_id)
        self._note_moved(move_file(self.root, path_of(self.root, group_id), why))

    def _end_step(self, step: int, metrics: bytes) -> None:
        if self._records.end_step(step, metrics):
            self._lines.add(METRICS_FILE, metrics)

    def _supersede(self, step: int) -> None:
        self._records.supersede(step)
        self._copy()

    def _copy(self) -> None:
        """Make the files that are copies of rows again."""
        self._lines.be(METRICS_FILE, [_json(line) for line in self.reading.metrics()])
        kept = self.reading.evaluations()
        self._lines.be(EVALUATIONS_FILE, [_json(dataclasses.asdict(one)) for one in kept])
        self._lines.be(POISONED_FILE, [_json(one) for one in self.reading.poisoned()])

    def _note_moved(self, moved: Moved) -> None:
        kept = f"; kept as {moved.place.relative_to(self.root)}" if moved.place else ""
        fields: dict[str, Any] = {"where": moved.where, "cause": moved.why}
        if moved.group is not None:
            fields["group"] = moved.group
        self._note("quarantined", f"{moved.where}: {moved.why}{kept}", fields)

    def _note(self, kind: str, detail: str, fields: Mapping[str, Any] | None = None) -> None:
        """An event of the store itself, from its own thread."""
        self._lines.add(EVENTS_FILE, event_line(kind, "", detail, fields))


def event_line(kind: str, actor: str, detail: str, fields: Mapping[str, Any] | None) -> bytes:
    """An event as a line, with the wall clock in seconds since 1970."""
    event: dict[str, Any] = {"time": round(time.time(), 3), "event": kind}
    event |= {"actor": actor, "detail": detail}
    if fields:
        event["fields"] = dict(fields)
    return _json(event)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
