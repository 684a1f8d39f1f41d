"""Executes samples: as many at once as the generators take, fairly among clients.

A sample's seed is the client's or follows from the operation's id, so that one that is executed
again, after a process was lost, gives the same tokens.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.plugins.tinker.models.messages import ScoreRequest, Scores
from composer_mesh.plugins.tinker.server.backend import SERVER_FAULTS, BackendLost, SampleBackend
from composer_mesh.plugins.tinker.server.fair_queue import MOST_TAKEN
from composer_mesh.plugins.tinker.server.records import MOST_ATTEMPTS, Operation
from composer_mesh.plugins.tinker.server.requests import SampleRequest, target_ids
from composer_mesh.plugins.tinker.server.results import (
    NO_LOGPROB,
    Result,
    failure,
    fault,
    given_up,
    sample_result,
)
from composer_mesh.plugins.tinker.server.server import ServedModel, TrainingServer
from composer_mesh.rollouts.generation import (
    GenerationRequest,
    GenerationResult,
    Truncation,
    tokens_to_stop,
)
from composer_mesh.services.web.errors import RequestRefused

logger = logging.getLogger(__name__)


class SamplingLane:
    """Executes what a server has queued, `samples_at_once` operations together."""

    def __init__(self, server: TrainingServer, backend: SampleBackend) -> None:
        self._server, self._backend, self._queue = server, backend, server.samples
        self._running: dict[str, Operation] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks(self._fail)

    async def run(self) -> None:
        """Execute samples, forever; raises what ends the server."""
        try:
            while True:
                self._server.sample_arrived.clear()
                self._start_next()
                arriving = self._server.sample_arrived.wait()
                waiting: asyncio.Future[Any] = asyncio.ensure_future(arriving)
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
            await self._server.finish([waiting], failure("it was cancelled", "user"))
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
        return len(self._running) < max(1, self._server.served.samples_at_once >> (4 * attempts))

    def _fail(self, name: str, error: BaseException) -> None:
        del name
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _execute(self, operation: Operation) -> None:
        try:
            with self._server.executing.during([operation]):
                answer = await self._answer(operation)
                if answer is not None:
                    await self._server.finish([operation], answer)
        finally:
            self._server.payloads.executed(operation)
            self._running.pop(operation.request_id, None)
            if operation.result is None and not self._failed.done():
                self._queue.put(operation)
            self._server.sample_arrived.set()

    async def _answer(self, operation: Operation) -> Result | None:
        """Return the answer to an operation; None where it has to be tried again."""
        if operation.attempts >= MOST_ATTEMPTS:
            return given_up(operation.attempts, "the server ended in the last one")
        try:
            return await self._sampled(operation)
        except (RequestRefused, ValueError, RequestAborted) as error:
            return failure(str(error), "user")
        except BackendLost as error:
            await self._server.count_attempts([operation])
            tried = operation.attempts
            return given_up(tried, str(error)) if tried >= MOST_ATTEMPTS else None
        except SERVER_FAULTS:
            raise
        except Exception as error:  # supervision boundary: an operation's error is its own
            logger.exception("operation %s failed", operation.request_id)
            return fault(error)

    async def _sampled(self, operation: Operation) -> Result:
        payload: SampleRequest = await self._server.payloads.read(operation)
        snapshot = self._file_of(operation.request.client, payload)
        requests = generation_requests(operation.request_id, payload, self._server.served)
        ids = payload.prompt.ids
        found, prompt = await asyncio.gather(
            self._backend.sample(snapshot, requests), self._prompt(snapshot, payload, ids)
        )
        texts = payload.sampling_params.stop_texts
        sequences = [cut_after(texts, one, self._server.served.text_of) for one in found]
        tops: Sequence[Scores | None] = [None] * len(sequences)
        if payload.topk_sample_logprobs:
            whole = [ids + one.token_ids for one in sequences]
            query = ScoreRequest(payload.topk_sample_logprobs)
            tops = await self._backend.score(snapshot, whole, query)
        return sample_result(sequences, tops, prompt, bool(payload.prompt_logprobs))

    def _file_of(self, client: str, payload: SampleRequest) -> str:
        file, registry = "", self._server.registry
        if payload.sampling_session_id is not None:
            file = registry.file_of(registry.sampler(client, payload.sampling_session_id))
        elif payload.model_path is not None:
            file = registry.saved(client, payload.model_path).file
        return str(self._server.folder / file) if file else ""

    async def _prompt(self, snapshot: str, payload: SampleRequest, ids: list[int]) -> Scores | None:
        targets, top_k = payload.target_prompt_logprobs, payload.topk_prompt_logprobs
        if not (payload.prompt_logprobs or top_k or targets is not None):
            return None
        query = ScoreRequest(top_k, None if targets is None else target_ids(targets, len(ids)))
        (found,) = await self._backend.score(snapshot, [ids], query)
        return _only_last(found, payload.prompt_logprobs_last_n)


def generation_requests(
    request_id: str, payload: SampleRequest, served: ServedModel
) -> list[GenerationRequest]:
    """Return a request for each sample, with seeds of their own."""
    settings, ids = payload.sampling_params, payload.prompt.ids
    most = settings.max_tokens or served.data.context - len(ids)
    base = request_id if settings.seed is None else str(settings.seed)
    return [
        GenerationRequest(
            f"{request_id}/{number}",
            ids,
            most,
            settings.temperature,
            _seed(f"{base}/{number}"),
            [*served.stop_ids, *settings.stop_ids],
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


def cut_after(
    texts: Sequence[str], result: GenerationResult, text_of: Callable[[list[int]], str]
) -> GenerationResult:
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
