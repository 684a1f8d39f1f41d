"""Sends generation requests to the generators: individually, or in closed batches.

Pooled requests are sent as they arrive, to the least busy generator. In lockstep all episodes take
their turns together, so batches, and with them every bit of the run, are reproducible. Requests of
a generator that died are sent to another one with the same seeds; only the composition of their
batch then differs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services.service import Service

Waiting = tuple[GenerationRequest, asyncio.Future[GenerationResult]]


class PooledGeneration:
    """Sends each request as it arrives."""

    def __init__(self, generators: Service) -> None:
        self._generators = generators

    def episode(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result: GenerationResult = await self._generators.generate(request)
        return result


class LockstepGeneration:
    """Waits until every announced episode has a request, then sends all in a fixed order."""

    def __init__(self, generators: Service) -> None:
        self._generators = generators
        self._waiting: list[Waiting] = []
        self._live = 0
        self._rounds: set[asyncio.Task[None]] = set()

    def episode(self) -> AbstractContextManager[None]:
        """Announce an episode; it counts from this call on, not only from entering the context."""
        self._live += 1
        return self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._live -= 1
            self._send_if_complete()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._send_if_complete()
        return await answer

    def _send_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._live:
            batch, self._waiting = self._waiting, []
            batch.sort(key=lambda waiting: waiting[0].request_id)
            sending = asyncio.create_task(self._send(batch))
            self._rounds.add(sending)
            sending.add_done_callback(self._rounds.discard)

    async def _send(self, batch: list[Waiting]) -> None:
        count = len(self._generators)
        shares = [batch[index::count] for index in range(count)]
        await asyncio.gather(*(self._send_to(i, share) for i, share in enumerate(shares) if share))

    async def _send_to(self, index: int, share: list[Waiting]) -> None:
        try:
            results = await self._results(index, [request for request, _ in share])
            answered = list(zip(share, results, strict=True))
        except Exception as error:  # noqa: BLE001  every episode of the batch must get it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in answered:
            if not answer.done():
                answer.set_result(result)

    async def _results(
        self, index: int, requests: list[GenerationRequest]
    ) -> list[GenerationResult]:
        """Return results from the share's own replica, or from any other where that one is gone or
        failed."""
        results: list[GenerationResult]
        try:
            results = await self._generators.on(index, "generate_many", requests)
        except Exception:  # noqa: BLE001  supervision boundary: retried once on another replica
            results = await self._generators.generate_many(requests)
        return results
