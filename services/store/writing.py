"""Writer of a run directory: results are stored before they are used.

    enter, add_event, add_evaluation, add_poisoned          queued, in order, without waiting
    await add_group, add_teacher_queries, plan_step, ...    on disk when they return

A thread writes, so the event loop is never blocked. An error of a queued write ends the run at the
next awaited call. `reading` reads the rows, also while the run is live.

The writer's thread runs jobs in order, so that the event loop never waits for a disk.

    tell(job)          queued without waiting; its error is raised by later `call`s or by `close`
    await call(job)    queued; waits for the job and returns its result or raises its error

A queued job is executed even if its caller is cancelled.
"""

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from composer_mesh.actors.checkpoints.folder import FOLDER as CHECKPOINTS
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import OpenFolder, write_whole
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tasks import PoisonedInput
from composer_mesh.rollouts.traces import Trace, TurnDivergences
from composer_mesh.services.directory.claim import sign
from composer_mesh.services.directory.file_checksums import AppendedLines
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    HINT_TEMPLATES_FILE,
    METRICS_FILE,
    TIMELINE_FILE,
    Evaluation,
)
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.records import (
    QuarantinedItem,
    RunRecords,
    move_file,
    repair_on_open,
)
from composer_mesh.services.store.schema import KIND

T = TypeVar("T")
Job = Callable[[], Any]
Settle = Callable[[Any, BaseException | None], None]
ErrorsNamed = Callable[[], AbstractContextManager[None]]


class WriterThread:
    """Executes jobs in order; `idle` is called in the thread when the queue is empty.

    Each job runs in a context of `errors`, which may name what it raises.
    """

    def __init__(self, idle: Job, errors: ErrorsNamed = nullcontext) -> None:
        self._idle, self._errors = idle, errors
        self._jobs: SimpleQueue[tuple[Job, Settle] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._seen = False
        self._waits: list[float] = []
        self._longest = 0
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    def tell(self, job: Job) -> None:
        """Queue a job after the earlier ones, without waiting."""
        self._put(job, self._keep_failure)

    async def call(self, job: Callable[[], T]) -> T:
        """Queue a job after the earlier ones and wait for its result, without blocking the loop."""
        self.raise_failure()
        began, loop = time.perf_counter(), asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(self._settle, done, result, error)
            except RuntimeError:  # the loop ended before the job
                self._keep_failure(None, error)

        self._put(job, settle)
        try:
            return await done
        finally:
            self._waits.append(time.perf_counter() - began)

    def close(self) -> None:
        """Wait for all jobs, then raise the first error that was not raised before."""
        self._jobs.put(None)
        self._thread.join()
        if not self._seen:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a failed job that no caller waited for."""
        if self._failure is not None:
            self._seen = True
            raise self._failure

    def waits(self) -> tuple[list[float], int]:
        """Return sorted wait times of calls in seconds and the longest queue since last time."""
        waits, self._waits = sorted(self._waits), []
        longest, self._longest = self._longest, 0
        return waits, longest

    def _put(self, job: Job, settle: Settle) -> None:
        self._jobs.put((job, settle))
        self._longest = max(self._longest, self._jobs.qsize())

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            self._do(*task)
            if self._jobs.empty():
                self._do(self._idle, self._keep_failure)
        self._do(self._idle, self._keep_failure)

    def _do(self, job: Job, settle: Settle) -> None:
        try:
            with self._errors():
                result = job()
        except BaseException as error:  # noqa: BLE001  the waiting caller gets it
            settle(None, error)
        else:
            settle(result, None)

    def _keep_failure(self, _: Any, error: BaseException | None) -> None:
        self._failure = self._failure or error

    def _settle(
        self, done: "asyncio.Future[Any]", result: Any, error: BaseException | None
    ) -> None:
        if done.cancelled():
            self._keep_failure(None, error)
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)


CONFIG_FILE = "config.toml"
EVENTS_FILE = "events.jsonl"
POISONED_FILE = "poisoned.jsonl"
LOOK_EVERY_S = 1.0


class RunStore:
    """One run's directory, as a context manager. Other processes may read concurrently."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root
        self._bytes = 0
        with self._disk_errors():
            root.mkdir(parents=True, exist_ok=True)
            with OpenFolder(root) as folder:
                folder.make(CHECKPOINTS)
            self._lines, self._records = AppendedLines(root), RunRecords(root)
            self.reading = RunReader(root)
            try:
                self._open(config)
            except BaseException:
                self._close()
                raise
        self._thread = WriterThread(self._sync, self._disk_errors)

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

    def finish(self) -> None:
        """Wait for all queued writes; raise the error of one that nobody has waited for."""
        self._thread.close()

    async def until_lost(self) -> None:
        """Wait until the run's directory is removed or replaced, then raise StoreError."""
        while True:
            await asyncio.to_thread(self._records.file.refuse_if_lost)
            await asyncio.sleep(LOOK_EVERY_S)

    def enter(self, group_id: int, version: int) -> None:
        """Record that a group enters the window, for the first time or again, at `version`."""
        self._thread.tell(partial(self._records.enter, group_id, version))

    def add_event(
        self,
        kind: str,
        actor: str = "",
        detail: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a lifecycle or supervision event, with the wall clock in seconds since 1970.

        `fields` are machine-readable: kind, host, rank, cause, class, generation.
        """
        line = event_line(kind, actor, detail, fields)
        self._thread.tell(partial(self._lines.add, EVENTS_FILE, line))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Store one held-out evaluation, with the number of steps that the policy was trained."""
        body = _json(dataclasses.asdict(evaluation))
        self._thread.tell(partial(self._records.add_evaluation, evaluation.step, body))
        self._thread.tell(partial(self._lines.add, EVALUATIONS_FILE, body, copy=True))

    def add_timeline(self, line: Mapping[str, Any]) -> None:
        """Append what the actors did in a step; of no use to the run itself."""
        self._thread.tell(partial(self._lines.add, TIMELINE_FILE, _json(line)))

    def add_divergences(self, step: int, divergences: Sequence[TurnDivergences]) -> None:
        """Store the divergences of a step's hinted turns; of no use to the run itself."""
        self._thread.tell(partial(self._records.add_divergences, step, divergences))

    def add_poisoned(self, poisoned: PoisonedInput) -> None:
        """Store one episode that was quarantined because it failed repeatedly in the same way."""
        body = _json(dataclasses.asdict(poisoned))
        self._thread.tell(partial(self._records.add_poisoned, body))
        self._thread.tell(partial(self._lines.add, POISONED_FILE, body, copy=True))

    async def keep_hint_templates(self, templates: Mapping[str, str]) -> None:
        """Write the hint templates of the run, for viewers: they import no task."""
        await self._thread.call(partial(self._keep_hint_templates, _json(templates) + b"\n"))

    async def add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]:
        """Store a finished group, unless it is already stored; return the stored traces."""
        return await self._thread.call(partial(self._add_group, group_id, traces))

    async def add_worded(self, group_id: int, worded: bytes) -> None:
        """Store the hint writer's output for a group."""
        await self._thread.call(partial(self._records.add_worded, group_id, worded))

    async def add_teacher_queries(
        self, group_id: int, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]:
        """Store the outcome of a group's teacher queries, with its pairs; return the new pairs."""
        return await self._thread.call(
            partial(self._records.add_teacher_queries, group_id, body, pairs)
        )

    async def take_pairs(
        self, step: int, max_age: int, limit: int
    ) -> tuple[list[PreferencePair], int]:
        """Return the oldest waiting pairs that a step may train, and the number of expired ones.

        Changes nothing: `plan_step` records what the step takes.
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
        """Store what step `step` (from 0) takes, before it is trained, in one transaction.

        Groups and pairs (by id) are trained with it; waiting pairs older than `max_age` expire.
        `rewards` maps late rewards by place to their state: trained or expired. Raises ValueError
        if a group is not finished or a pair is not waiting.
        """
        plan = partial(self._records.plan_step, step, list(groups), manifest, list(pairs))
        await self._thread.call(partial(plan, max_age, dict(rewards or {})))

    async def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of a planned step, unless it already has some."""
        await self._thread.call(partial(self._end_step, step, _json(metrics)))

    async def supersede(self, step: int) -> None:
        """Supersede this step and later ones; their groups, pairs and rewards wait again."""
        await self._thread.call(partial(self._supersede, step))

    async def quarantine(self, group_id: int, why: str) -> None:
        """Quarantine a damaged group file; the group is sampled again, unless it was trained."""
        await self._thread.call(partial(self._quarantine, group_id, why))

    def waits(self) -> dict[str, float]:
        """Return figures since last time: wait seconds of calls, bytes written, longest queue."""
        waits, queue = self._thread.waits()
        written, self._bytes = self._bytes, 0
        return {
            "store/wait_p50_s": _quantile(waits, 0.5),
            "store/wait_p99_s": _quantile(waits, 0.99),
            "store/bytes": float(written),
            "store/queue": float(queue),
        }

    def _open(self, config: Config) -> None:
        """Prepare the directory: repair damage, rebuild copies."""
        path, content = self.root / CONFIG_FILE, dump_toml(config).encode()
        write_whole(path, content)
        sign(path, content)
        self._lines.checksums.whole(CONFIG_FILE, content)
        for one in repair_on_open(self.root, self._records, self.reading):
            self._note_moved(one)
        self._copy()

    def _keep_hint_templates(self, content: bytes) -> None:
        write_whole(self.root / HINT_TEMPLATES_FILE, content)
        self._lines.checksums.whole(HINT_TEMPLATES_FILE, content)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(self.root, error) from None

    def _sync(self) -> None:
        self._lines.sync()
        self._records.file.refuse_if_lost()
        try:
            self._lines.checksums.write()
        except OSError:
            self._records.file.refuse_if_lost()  # says more than a missing folder does
            raise

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
            self._lines.add(METRICS_FILE, metrics, copy=True)

    def _supersede(self, step: int) -> None:
        self._records.supersede(step)
        self._copy()

    def _copy(self) -> None:
        """Rebuild the files that are copies of rows."""
        self._lines.be(METRICS_FILE, [_json(line) for line in self.reading.metrics()])
        kept = self.reading.evaluations()
        self._lines.be(EVALUATIONS_FILE, [_json(dataclasses.asdict(one)) for one in kept])
        self._lines.be(POISONED_FILE, [_json(one) for one in self.reading.poisoned()])

    def _note_moved(self, moved: QuarantinedItem) -> None:
        kept = f"; kept as {moved.place.relative_to(self.root)}" if moved.place else ""
        fields: dict[str, Any] = {"where": moved.where, "cause": moved.why}
        if moved.group is not None:
            fields["group"] = moved.group
        self._note("quarantined", f"{moved.where}: {moved.why}{kept}", fields)

    def _note(self, kind: str, detail: str, fields: Mapping[str, Any] | None = None) -> None:
        """Record an event of the store itself, from the writer thread."""
        self._lines.add(EVENTS_FILE, event_line(kind, "", detail, fields))


def disk_error(root: Path, error: OSError) -> StoreError:
    """Return the error of a run whose directory cannot be written."""
    where = error.filename or root
    return StoreError(str(where), KIND.purpose, error.strerror or str(error), KIND.repair)


def event_line(kind: str, actor: str, detail: str, fields: Mapping[str, Any] | None) -> bytes:
    """Serialize an event to a line, with the wall clock in seconds since 1970."""
    event: dict[str, Any] = {"time": round(time.time(), 3), "event": kind}
    event |= {"actor": actor, "detail": detail}
    if fields:
        event["fields"] = dict(fields)
    return _json(event)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
