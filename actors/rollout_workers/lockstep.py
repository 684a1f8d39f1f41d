"""The rounds of lockstep at a rollout worker: requests wait until the controller releases them.

In lockstep all episodes of a run take their turns together, so the batches that generators compute,
and with them every bit of the run, are the same however many rollout workers there are. The
controller decides from the names of the waiting requests which generator takes which of them; the
requests themselves go to the generators directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from composer_mesh.actors.rollout_workers.peers import Peers
from composer_mesh.mesh.waiting import BackgroundTasks, told_to_loop
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Waiting = tuple[GenerationRequest, asyncio.Future[GenerationResult]]


@dataclass(frozen=True)
class Round:
    """One closed batch: for each generator the names of the requests, of all workers together.

    One that `continues` follows another of the same episodes.
    """

    number: int
    continues: bool
    shares: Mapping[str, Sequence[str]]


class LockstepGeneration:
    """The port `Generation` of one worker, which plays `playing()` episodes at the moment."""

    def __init__(self, generators: Peers, playing: Callable[[], int]) -> None:
        self._generators, self._playing = generators, playing
        self._waiting: dict[str, Waiting] = {}
        self._told: set[str] = set()
        self._all_wait = asyncio.Event()
        self._rounds = BackgroundTasks(told_to_loop)

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        """Sample one continuation. Waits for the round that has it."""
        answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, answer)
        self.changed()
        try:
            return await answer
        finally:
            self._waiting.pop(request.request_id, None)

    def changed(self) -> None:
        """Check whether every episode waits; call it when an episode has ended too."""
        episodes = {request_id.rpartition("-")[0] for request_id in self._waiting}
        if episodes and len(episodes) >= self._playing():
            self._all_wait.set()

    async def waiting(self) -> list[str]:
        """Return the names of all waiting requests. Waits until each episode here has one."""
        await self._all_wait.wait()
        self._all_wait.clear()
        self._told = set(self._waiting)
        return sorted(self._told)

    def release(self, turn: Round) -> None:
        """Send this worker's requests of a round."""
        for generator, names in turn.shares.items():
            share = [self._waiting.pop(name) for name in names if name in self._waiting]
            if len(share) < len(self._told.intersection(names)):  # one was cancelled meanwhile
                closing = self._generators.call(generator, "close_round", turn.number)
                self._rounds.start(f"closing round {turn.number} at {generator}", closing)
            if share:
                sending = self._send(turn, generator, share)
                self._rounds.start(f"round {turn.number} at {generator}", sending)

    async def close(self) -> None:
        """Stop the rounds under way."""
        await self._rounds.close()

    async def _send(self, turn: Round, generator: str, share: list[Waiting]) -> None:
        requests = [request for request, _ in share]
        try:
            results = await self._results(turn, generator, requests)
            answered = list(zip(share, results, strict=True))
        except Exception as error:  # noqa: BLE001  every episode of the share must get it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in answered:
            if not answer.done():
                settle(answer, result)

    async def _results(
        self, turn: Round, generator: str, requests: list[GenerationRequest]
    ) -> list[GenerationResult | Exception]:
        """Return results from the share's own generator, or from another where that one failed."""
        results: list[GenerationResult | Exception]
        size = len(turn.shares[generator])
        try:
            results = await self._generators.call(
                generator, "generate_round", turn.number, size, requests, turn.continues
            )
        except Exception:  # noqa: BLE001  supervision boundary: sent once more, elsewhere
            names = await self._generators.some_open()
            other = next((name for name in names if name != generator), names[0])
            results = await self._generators.call(other, "generate_many", requests)
        return results


def settle(answer: asyncio.Future[GenerationResult], result: GenerationResult | Exception) -> None:
    """End an answer with its result, or with the error of a request that was aborted."""
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
