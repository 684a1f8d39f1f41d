"""Executes the operations of models: takes them from the queue, has them computed, writes answers.

One group of operations is executed at a time. Its answers, the positions of its models and what it
saved are written in one transaction, while the next group is executed already; clients get answers
after it. If the trainer is lost before, the group is executed again on models as they were. Should
the log not be written, the lane ends, and the server with it.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_mesh.mesh.failures import cause_of
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.models.messages import CHANGES, TrainCall, TrainResult
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import SERVER_FAULTS, BackendLost, TrainBackend
from composer_mesh.plugins.tinker.server.model_store import (
    ModelStore,
    OperationTarget,
    StateLost,
    target_of,
)
from composer_mesh.plugins.tinker.server.records import (
    MOST_ATTEMPTS,
    Model,
    Operation,
    SamplerSource,
    Saved,
)
from composer_mesh.plugins.tinker.server.requests import call_of
from composer_mesh.plugins.tinker.server.results import (
    Result,
    failure,
    fault,
    given_up,
    json_result,
    training_result,
)
from composer_mesh.plugins.tinker.server.server import UNLOADED, TrainingServer
from composer_mesh.services.web.errors import RequestRefused

EACH = 4
"""Operations of one model in a group."""

logger = logging.getLogger(__name__)


@dataclass
class _Outcome:
    """What a group's transaction writes."""

    finished: list[log.Finished] = field(default_factory=list)
    models: dict[str, Model] = field(default_factory=dict)
    made: list[Saved | SamplerSource] = field(default_factory=list)
    answers: list[tuple[Operation, Result]] = field(default_factory=list)

    def write(self, rows: sqlite3.Connection) -> None:
        log.finish(rows, self.finished)
        for one in (*self.models.values(), *self.made):
            log.put(rows, one)


class TrainingLane:
    """Executes what a server has queued, until it is cancelled or nothing computes any more."""

    def __init__(self, server: TrainingServer, backend: TrainBackend, store: ModelStore) -> None:
        self._server, self._backend, self._store = server, backend, store
        self._registry, self._limits = server.registry, server.served.limits
        self._writing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Execute operations, forever."""
        models = min(self._limits.batched_models, self._limits.models_in_memory)
        tokens = self._server.served.tokens_at_once
        try:
            while True:
                self._server.training_arrived.clear()
                await self._give_up_gaps()
                group = self._server.training.take(models, EACH, tokens)
                if group:
                    await self._execute_until_done(group)
                else:
                    await self._wait()
        finally:
            if self._writing is not None:
                await cancel_and_wait([self._writing])

    async def _wait(self) -> None:
        """Wait for operations; raises where the last group could not be written."""
        wait_s = self._limits.gap_s / 2 if len(self._server.training) else None
        woken: asyncio.Future[Any] = asyncio.ensure_future(self._server.training_arrived.wait())
        waited = [woken, *filter(None, [self._writing])]
        try:
            await asyncio.wait(waited, timeout=wait_s, return_when="FIRST_COMPLETED")
        finally:
            woken.cancel()
        if self._writing is not None and self._writing.done():
            await self._written()

    async def _written(self) -> None:
        """Wait until the answers of the last group are in the log; raises where they are not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def _give_up_gaps(self) -> None:
        gap_s = self._limits.gap_s
        for operation, missing in self._server.training.overdue(time.time() - gap_s):
            text = (
                f"seq_id {operation.request.seq} waited {gap_s:g} s for {missing}, which was not "
                "received: send operations without gaps"
            )
            await self._server.finish([operation], failure(text, "user"))

    async def _execute_until_done(self, group: list[Operation]) -> None:
        """Execute a group; one by one if it fails, or if a process was lost with one of them."""
        if not any(one.attempts for one in group):
            try:
                await self._execute(group)
                return
            except SERVER_FAULTS:
                raise
            except Exception as error:  # noqa: BLE001  supervision boundary: each is tried alone
                await self._failed(group, error)
        for one in group:
            if one.result is None:
                await self._execute_alone(one)

    async def _execute_alone(self, one: Operation) -> None:
        """Execute an operation; it fails by its own error, or once it was tried too often."""
        reason = "the server ended in the last one"
        while one.attempts < MOST_ATTEMPTS:
            try:
                await self._execute([one])
                return
            except SERVER_FAULTS:
                raise
            except Exception as error:  # supervision boundary: an operation's error is its own
                await self._failed([one], error)
                if not isinstance(error, BackendLost):
                    logger.exception("operation %s failed", one.request_id)
                    await self._server.finish([one], fault(error))
                    return
                reason = str(error)
        await self._server.finish([one], given_up(one.attempts, reason))

    async def _failed(self, group: Sequence[Operation], error: Exception) -> None:
        """Note that a group failed: what the trainer has of its models may differ from the log."""
        self._store.lost()
        if isinstance(error, BackendLost):
            await self._server.count_attempts(group)

    async def _execute(self, group: list[Operation]) -> None:
        try:
            with self._server.executing.during(group):
                await self._try(group)
        finally:
            for one in group:
                self._server.payloads.executed(one)

    async def _try(self, group: list[Operation]) -> None:
        alive = [one for one in group if not self._registry.models[one.model].unloaded]
        await self._server.finish([one for one in group if one not in alive], UNLOADED)
        ready = await self._with_models(alive)
        for one in ready:
            await self._server.payloads.read(one)
        if ready:
            targets, calls, refused = self._calls(ready)
            for operation, error in refused:
                await self._server.finish([operation], failure(str(error), "user"))
            ready = [one for one in ready if one.number in targets]
            results = await self._backend.execute(calls) if calls else []
            await self._settle(ready, [targets[one.number] for one in ready], results)

    async def _with_models(self, group: list[Operation]) -> list[Operation]:
        """Return the operations whose model the trainer holds now; the others are answered."""
        names = list(dict.fromkeys(one.model for one in group))
        try:
            await self._store.need(names)
            return group
        except StateLost as lost:
            broken = lost.args[0]
            mine = [one for one in group if one.model == broken]
            await self._server.finish(mine, failure(str(lost), "server"))
            rest = [one for one in group if one.model != broken]
            return await self._with_models(rest) if rest else []

    def _calls(
        self, group: Sequence[Operation]
    ) -> tuple[dict[int, OperationTarget], list[TrainCall], list[tuple[Operation, RequestRefused]]]:
        targets: dict[int, OperationTarget] = {}
        calls, refused = [], []
        for one in group:
            try:
                target = target_of(one, self._registry)
            except RequestRefused as error:
                refused.append((one, error))
                continue
            targets[one.number] = target
            position = self._registry.models[one.model].position
            path = str(self._server.folder / target.file) if target.file else ""
            kind = one.request.kind
            calls.append(call_of(kind, one.model, one.payload, position, path, target.optimizer))
        return targets, calls, refused

    async def _settle(
        self,
        group: Sequence[Operation],
        targets: Sequence[OperationTarget],
        results: Sequence[TrainResult],
    ) -> None:
        """Begin to write a group's answers. Waits until those of the last one are written."""
        outcome, now = _Outcome(), time.time()
        for operation, target, result in zip(group, targets, results, strict=True):
            self._add(outcome, operation, target, result, now)
        loaded = [one.model for one in group if one.request.kind == "load_weights"]
        for model in dict.fromkeys(loaded):  # a repetition must not need the loaded file again
            outcome.models[model] = await self._store.write(outcome.models[model])
        await self._written()
        former = self._remember(outcome)
        # Queued here, not in the task, so that no later job of the log comes before it.
        written = self._server.commits.start(outcome.write)
        self._writing = asyncio.create_task(self._answer(written, outcome, former))
        for held in list(outcome.models.values()):
            steps, kept = held.steps - held.saved_steps, self._store.kept.get(held.id, 0)
            if steps >= self._limits.save_every or kept >= self._limits.max_repeated_mb * 1e6:
                await self._save(held.id)

    def _remember(self, outcome: _Outcome) -> list[str]:
        """Let the next group see what this one did; return the files that no model needs then."""
        held = outcome.models.values()
        former = [self._registry.models[one.id].file for one in held]
        gone = [file for file, one in zip(former, held, strict=True) if file and file != one.file]
        for model in held:
            self._registry.set_model(model)
        for one in outcome.made:
            if isinstance(one, Saved):
                self._registry.weights[one.id] = one
            else:
                self._registry.samplers[one.id] = one
        return gone

    async def _answer(
        self, written: asyncio.Future[None], outcome: _Outcome, former: Sequence[str]
    ) -> None:
        """Give a group's answers once they are in the log."""
        await asyncio.shield(written)
        for operation, answer in outcome.answers:
            self._server.answered(operation, answer)
        for file in former:
            await asyncio.to_thread((self._server.folder / file).unlink, missing_ok=True)

    def _add(
        self,
        outcome: _Outcome,
        operation: Operation,
        target: OperationTarget,
        result: TrainResult,
        now: float,
    ) -> None:
        kind = operation.request.kind
        held = outcome.models.get(operation.model) or self._registry.models[operation.model]
        changed = kind in CHANGES and not result.error
        answer = (
            failure(result.error, "user") if result.error else _answer(operation, target, result)
        )
        keep = changed and kind != "load_weights"
        if keep:
            self._store.keep(operation)
        position = held.position if changed else None
        finished = log.Finished(operation.number, answer, now, position, result.shape, keep)
        outcome.finished.append(finished)
        outcome.answers.append((operation, answer))
        steps = held.steps + (kind == "optim_step" and changed)
        moved = replace(held, position=held.position + changed, steps=steps, used=now)
        outcome.models[held.id] = moved
        if isinstance(target.made, Saved) and not result.error:
            size = int(result.metrics["bytes"])
            outcome.made.append(replace(target.made, bytes=size, created=now))
        elif target.made is not None and not result.error:
            outcome.made.append(target.made)

    async def _save(self, model: str) -> None:
        """Write a model's state; where that fails, it is tried again after the next group."""
        try:
            await self._store.save(model)
        except SERVER_FAULTS:
            raise
        except Exception as error:  # noqa: BLE001  the operations before it are done
            logger.warning("the state of %s was not written: %s", model, cause_of(error))
            self._store.lost()


def _answer(operation: Operation, target: OperationTarget, result: TrainResult) -> Result:
    kind = operation.request.kind
    if kind in ("forward", "forward_backward"):
        return training_result(result)
    if kind == "optim_step":
        return json_result(type="optim_step", metrics=dict(result.metrics))
    more: dict[str, Any] = {}
    if kind == "load_weights":
        more = {"path": operation.payload.path, "model_id": operation.model}
    elif isinstance(target.made, SamplerSource):
        more = {"sampling_session_id": target.made.id}
    elif target.made is not None:
        more = {"path": target.made.path}
    return json_result(type=kind, **more)
