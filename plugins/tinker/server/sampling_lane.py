"""Executes samples: as many at once as the generators take, fairly among clients.

A sample's seed is the client's or follows from the operation's id, so that one that is executed
again, after a process was lost, gives the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.plugins.tinker.models.messages import ScoreRequest, Scores
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import SERVER_FAULTS, BackendLost, SampleBackend
from composer_mesh.plugins.tinker.server.fair_queue import MOST_TAKEN, SampleQueue
from composer_mesh.plugins.tinker.server.payloads import Payloads
from composer_mesh.plugins.tinker.server.records import MOST_ATTEMPTS, Executing, Operation
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.requests import SampleRequest, target_ids
from composer_mesh.plugins.tinker.server.results import (
    NO_LOGPROB,
    Result,
    failure,
    fault,
    given_up,
    sample_result,
)
from composer_mesh.rollouts.generation import (
    GenerationRequest,
    GenerationResult,
    Truncation,
    tokens_to_stop,
)
from composer_mesh.services.web.errors import RequestRefused

logger = logging.getLogger(__name__)
TextOf = Callable[[list[int]], str]


@dataclass(frozen=True)
class SamplingFacts:
    """What samples need to know of the model: its context, its end, its tokenizer."""

    context: int
    stop_ids: tuple[int, ...]
    text_of: TextOf


class SamplingLane:
    """Executes what `queue` has, `at_once` operations together."""

    def __init__(
        self,
        folder: Path,
        queue: SampleQueue,
        registry: Registry,
        commits: GroupCommit,
        backend: SampleBackend,
        facts: SamplingFacts,
        answered: Callable[[Operation, Result], None],
        executing: Executing,
        payloads: Payloads,
        at_once: int,
    ) -> None:
        self._folder, self._queue, self._registry = folder, queue, registry
        self._commits, self._backend, self._facts = commits, backend, facts
        self._answered, self._executing, self._payloads = answered, executing, payloads
        self._at_once = at_once
        self._wake = asyncio.Event()
        self._running: dict[str, Operation] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(self._fail)

    def wake(self) -> None:
        """Look at the queue again."""
        self._wake.set()

    @property
    def running(self) -> int:
        """Number of operations that are being executed."""
        return len(self._running)

    async def run(self) -> None:
        """Execute samples, forever; raises what ends the server."""
        try:
            while True:
                self._wake.clear()
                self._start_next()
                waiting: asyncio.Future[Any] = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait([waiting, self._failed], return_when="FIRST_COMPLETED")
                waiting.cancel()
                if self._failed.done():
                    self._failed.result()
        finally:
            await self._tasks.close()

    async def cancel(self, client: str, request_id: str) -> None:
        """Give a client's sample up, if it is not answered."""
        waiting = self._queue.remove(request_id)
        if waiting is not None and waiting.request.client == client:
            await self._finish(waiting, failure("it was cancelled", "user"))
        elif waiting is not None:
            self._queue.put(waiting)
        running = self._running.get(request_id)
        if running is not None and running.request.client == client and running.payload:
            samples = running.payload.num_samples
            await self._backend.abort([f"{request_id}/{n}" for n in range(samples)])

    def _start_next(self) -> None:
        while (one := self._queue.first()) is not None and self._has_room(one):
            self._queue.take()
            self._running[one.request_id] = one
            self._tasks.start(f"sample {one.request_id}", self._execute(one))

    def _has_room(self, one: Operation) -> bool:
        """Whether an operation may run with the others now.

        Those with which a generator was lost run with a sixteenth of the others, and then alone.
        So one that kills generators is found, and those that ran at the same time are answered.
        All that run have at most `MOST_TAKEN` bytes of data.
        """
        size = sum(other.size for other in self._running.values())
        if self._running and size + one.size > MOST_TAKEN:
            return False
        attempts = max(other.attempts for other in (one, *self._running.values()))
        return len(self._running) < max(1, self._at_once >> (4 * attempts))

    def _fail(self, name: str, error: BaseException) -> None:
        del name
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _execute(self, operation: Operation) -> None:
        try:
            with self._executing.during([operation]):
                answer = await self._answer(operation)
                if answer is not None:
                    await self._finish(operation, answer)
        finally:
            self._payloads.executed(operation)
            self._running.pop(operation.request_id, None)
            if operation.result is None and not self._failed.done():
                self._queue.put(operation)
            self.wake()

    async def _answer(self, operation: Operation) -> Result | None:
        """Return the answer to an operation; None where it has to be tried again."""
        if operation.attempts >= MOST_ATTEMPTS:
            return given_up(operation.attempts, "the server ended in the last one")
        try:
            return await self._sampled(operation)
        except (RequestRefused, ValueError, RequestAborted) as error:
            return failure(str(error), "user")
        except BackendLost as error:
            operation.attempts += 1
            numbers = [operation.number]
            await self._commits.run(partial(log.count_attempts, numbers=numbers))
            tried = operation.attempts
            return given_up(tried, str(error)) if tried >= MOST_ATTEMPTS else None
        except SERVER_FAULTS:
            raise
        except Exception as error:  # supervision boundary: an operation's error is its own
            logger.exception("operation %s failed", operation.request_id)
            return fault(error)

    async def _finish(self, operation: Operation, answer: Result) -> None:
        finished = [log.Finished(operation.number, answer, time.time())]
        await self._commits.run(partial(log.finish, finished=finished))
        self._answered(operation, answer)

    async def _sampled(self, operation: Operation) -> Result:
        payload: SampleRequest = await self._payloads.read(operation)
        snapshot = self._file_of(operation.request.client, payload)
        requests = generation_requests(operation.request_id, payload, self._facts)
        ids = payload.prompt.ids
        found, prompt = await asyncio.gather(
            self._backend.sample(snapshot, requests), self._prompt(snapshot, payload, ids)
        )
        texts = payload.sampling_params.stop_texts
        sequences = [cut_after(texts, one, self._facts.text_of) for one in found]
        tops: Sequence[Scores | None] = [None] * len(sequences)
        if payload.topk_sample_logprobs:
            whole = [ids + one.token_ids for one in sequences]
            query = ScoreRequest(payload.topk_sample_logprobs)
            tops = await self._backend.score(snapshot, whole, query)
        return sample_result(sequences, tops, prompt, bool(payload.prompt_logprobs))

    def _file_of(self, client: str, payload: SampleRequest) -> str:
        file = ""
        if payload.sampling_session_id is not None:
            sampler = self._registry.sampler(client, payload.sampling_session_id)
            file = self._registry.file_of(sampler)
        elif payload.model_path is not None:
            file = self._registry.saved(client, payload.model_path).file
        return str(self._folder / file) if file else ""

    async def _prompt(self, snapshot: str, payload: SampleRequest, ids: list[int]) -> Scores | None:
        targets, top_k = payload.target_prompt_logprobs, payload.topk_prompt_logprobs
        if not (payload.prompt_logprobs or top_k or targets is not None):
            return None
        query = ScoreRequest(top_k, None if targets is None else target_ids(targets, len(ids)))
        (found,) = await self._backend.score(snapshot, [ids], query)
        return _only_last(found, payload.prompt_logprobs_last_n)


def generation_requests(
    request_id: str, payload: SampleRequest, facts: SamplingFacts
) -> list[GenerationRequest]:
    """Return a request for each sample, with seeds of their own."""
    settings, ids = payload.sampling_params, payload.prompt.ids
    most = settings.max_tokens or facts.context - len(ids)
    base = request_id if settings.seed is None else str(settings.seed)
    return [
        GenerationRequest(
            f"{request_id}/{number}",
            ids,
            most,
            settings.temperature,
            _seed(f"{base}/{number}"),
            [*facts.stop_ids, *settings.stop_ids],
            truncation=Truncation(settings.top_p, max(0, settings.top_k)),
        )
        for number in range(payload.num_samples)
    ]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _only_last(scores: Scores, last: int | None) -> Scores:
    """Return scores of the last tokens of a prompt alone."""
    if last is None:
        return scores
    until = max(0, len(scores.logprobs) - last)
    own = scores.logprobs.copy()
    own[:until] = np.nan
    if scores.top_ids is None or scores.top_logprobs is None:
        return replace(scores, logprobs=own)
    ids, top = scores.top_ids.copy(), scores.top_logprobs.copy()
    ids[:until], top[:until] = 0, NO_LOGPROB
    return replace(scores, logprobs=own, top_ids=ids, top_logprobs=top)


def cut_after(texts: Sequence[str], result: GenerationResult, text_of: TextOf) -> GenerationResult:
    """Return a sample up to the token with which its text has one of `texts`."""
    count = tokens_to_stop(texts, result.token_ids, text_of)
    if count is None:
        return result
    return replace(
        result,
        token_ids=result.token_ids[:count],
        logprobs=result.logprobs[:count],
        versions=result.versions[:count],
        stop_reason="stop",
    )
