"""The port `Player` in the test's own process, with lockstep over any number of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from in_process_calls import peers

from composer_mesh.actors.engines.loop import BatchRounds
from composer_mesh.actors.rollout_workers.peers import LockstepGeneration, Round
from composer_mesh.mesh.waiting import BackgroundTasks, reported_to_loop
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Environments, EpisodePlayer, Generation, Played, Sample
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore
from composer_mesh.services.episodes.workers import LockstepRounds

Answer = Callable[[GenerationRequest], Awaitable[GenerationResult]]


class InProcessPlayer:
    """Plays samples here; nothing is announced."""

    def __init__(
        self, generation: Generation, environments: Environments, chat: ChatFormat
    ) -> None:
        self._player = EpisodePlayer(generation, environments, chat)

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        return [nullcontext() for _ in samples]

    async def play(self, sample: Sample, session: str) -> Played:
        return await self._player.play(sample, session)

    async def score_group(self, _episode: Episode, _group: Sequence[FinishedRollout]) -> GroupScore:
        raise AssertionError("the toolbox has no group rewards")

    async def close(self) -> None: ...


class InProcessGenerator:
    """The endpoints of a generator; `batches` are the names of each closed batch."""

    def __init__(self, answer: Answer) -> None:
        self.batches: list[list[str]] = []
        self._answer = answer
        self._rounds = BatchRounds(self._ask)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._answer(request)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        return [await self._answer(request) for request in requests]

    async def generate_round(
        self, number: int, size: int, requests: list[GenerationRequest], continues: bool
    ) -> list[GenerationResult]:
        while len(self.batches) <= number:
            self.batches.append([])
        answers = await self._rounds.share(number, size, requests, continues)
        self.batches[number] = sorted(
            {*self.batches[number], *(request.request_id for request in requests)}
        )
        return await asyncio.gather(*answers)

    async def close_round(self, number: int) -> None:
        self._rounds.close(number)

    def _ask(
        self, requests: list[GenerationRequest], _continues: bool
    ) -> list[asyncio.Future[GenerationResult]]:
        return [asyncio.ensure_future(self._answer(request)) for request in requests]


class LockstepWorker:
    """One rollout worker in lockstep."""

    def __init__(self, name: str, generators: Mapping[str, InProcessGenerator]) -> None:
        self.name = name
        self.playing: set[str] = set()
        self.peers = peers(dict(generators), name)
        self.generation = LockstepGeneration(self.peers, lambda: len(self.playing))


class LockstepPlayer:
    """Plays samples in lockstep; `worker_of` returns the index of a sample's worker."""

    def __init__(
        self,
        generators: Mapping[str, InProcessGenerator],
        environments: Environments,
        chat: ChatFormat,
        workers: int = 1,
        worker_of: Callable[[Sample], int] = lambda _: 0,
    ) -> None:
        self._environments, self._chat, self._worker_of = environments, chat, worker_of
        self.workers = [LockstepWorker(f"rollouts-{n}", generators) for n in range(workers)]
        self.released: list[Round] = []
        self.rounds = LockstepRounds(lambda: sorted(generators), self._release)
        self._tasks = BackgroundTasks(reported_to_loop)
        for worker in self.workers:
            self._tasks.start(worker.name, self._hear(worker))

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        return self.rounds.announce(samples)

    async def play(self, sample: Sample, session: str) -> Played:
        worker = self.workers[self._worker_of(sample)]
        worker.playing.add(session)
        player = EpisodePlayer(worker.generation, self._environments, self._chat)
        try:
            return await player.play(sample, session)
        finally:
            worker.playing.discard(session)
            worker.generation.changed()

    async def close(self) -> None:
        await self._tasks.close()
        for worker in self.workers:
            await worker.generation.close()
            await worker.peers.close()

    async def _hear(self, worker: LockstepWorker) -> None:
        while True:
            self.rounds.wait(worker.name, await worker.generation.waiting())

    def _release(self, turn: Round) -> None:
        self.released.append(turn)
        for worker in self.workers:
            worker.generation.release(turn)
