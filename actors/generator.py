"""The generator actor: serves many concurrent requests, continuously batched by its engine.

The engine decodes and `EngineLoop` decides when it steps; the actor adds requests, weight pulls and
the handling of engine failures.
"""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint, context

from composer_mesh.actors.engines.loop import Answer, BatchRounds, EngineLoop, EngineThread
from composer_mesh.actors.engines.port import RequestAborted, make_engine
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

CLOSE_S = 2.0
"""Seconds an engine may take to close: Monarch gives an actor's clean-up three seconds."""


class GeneratorActor(MeshActor):
    """One process with an engine.

    rollouts -- prompt ids --> GeneratorActor -- ids, log-probs, versions --> rollouts
    trainer == weights by RDMA ==> GeneratorActor
    """

    kind: ClassVar[str] = "generator"

    def __init__(self) -> None:
        self._thread = EngineThread()
        self._pulls = asyncio.Lock()
        self._loop: EngineLoop | None = None
        self._rounds = BatchRounds(self._ask_together)

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy as version 0 and start serving."""
        engine = await self._thread.run(make_engine, config, folder)
        self._loop, self._receiver = EngineLoop(engine, self._thread), WeightReceiver()
        self.policy_version = 0
        self._serving = asyncio.create_task(self._serve(self._loop))

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one continuation. Waits for its last token; others decode concurrently.

        A cancelled call aborts its request. Raises `RequestAborted` if another call did, or sent
        the same id again, and `DecodingDeadlineExceeded` after the request's own deadline.
        """
        return await self._serving_loop().ask(request)

    @concurrent_endpoint
    async def generate_many(
        self, requests: list[GenerationRequest], continues: bool = False
    ) -> list[GenerationResult | RequestAborted]:
        """Sample a closed batch; all requests are admitted before the first token.

        The same batch on an idle generator gives bit-identical results. So does the same sequence
        of batches where each but the first `continues` the one before it, that is, reuses its
        prefixes. A request that is aborted has its error in place of its result.
        """
        return await outcomes(self._serving_loop().ask_together(requests, continues=continues))

    @concurrent_endpoint
    async def abort(self, request_ids: list[str]) -> int:
        """Abort requests, whose callers get `RequestAborted`; return how many were unanswered.

        Does not wait. Their slots are free after the decode step under way; ids that are unknown or
        answered are ignored.
        """
        loop = self._serving_loop()
        return sum(loop.abort(request_id, "its caller requested it") for request_id in request_ids)

    @concurrent_endpoint
    async def generate_round(
        self, number: int, size: int, requests: list[GenerationRequest], continues: bool
    ) -> list[GenerationResult | RequestAborted]:
        """Sample one caller's share of a closed batch of `size` requests, as `generate_many` does.

        Waits until all shares have arrived, or `close_round`.
        """
        return await outcomes(await self._rounds.share(number, size, requests, continues))

    @concurrent_endpoint
    async def close_round(self, number: int) -> None:
        """Wait no longer for shares of a closed batch: one of its callers is dead."""
        self._rounds.close(number)

    @concurrent_endpoint
    async def pull(self, handle: WeightsHandle) -> int:
        """Switch to a published version between two decode steps; return it.

        Running requests continue with the new weights. Waits for the transfer and one decode step;
        a transfer that an earlier pull still waits for is abandoned, because its publisher may be
        gone.
        """
        self._receiver.abandon()
        async with self._pulls:
            staged = await self._receiver.receive(handle)
            await self._serving_loop().swap(staged)
            self.policy_version = staged.version
            return staged.version

    def details(self) -> dict[str, Any]:
        loop = self._loop
        if loop is None:
            return {"outstanding": 0, "tokens": 0}
        waiting, tokens = loop.outstanding, loop.engine.prompt_tokens
        activity = f"decoding {waiting} requests" if waiting else "idle"
        return {
            "activity": activity,
            "outstanding": waiting,
            "decoding": loop.engine.decoding,
            "tokens": loop.tokens,
            "aborted": loop.aborted,
            "prompt_tokens": tokens.prompt,
            "cached_tokens": tokens.cached,
            "computed_tokens": tokens.computed,
        }

    async def __cleanup__(self, _: Exception | None) -> None:
        """Close the engine, which may hold processes and shared memory; waits for its step."""
        if self._loop is not None:
            self._serving.cancel()
            closing = asyncio.ensure_future(self._loop.close())
            await asyncio.wait([closing], timeout=CLOSE_S)

    def _ask_together(self, requests: list[GenerationRequest], continues: bool) -> list[Answer]:
        return self._serving_loop().ask_together(requests, continues=continues)

    def _serving_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError("the generator has no engine: call load first")
        if self._serving.done():
            raise RuntimeError(f"the engine has stopped: {self._serving.exception()!r}")
        return self._loop

    async def _serve(self, loop: EngineLoop) -> None:
        """Run the engine loop; an engine failure ends the actor.

        Waiting callers then see the actor's death and may retry on another generator.
        """
        try:
            await loop.serve()
        except Exception as error:  # supervision boundary: no caller may wait for a dead engine
            why = f"its engine stopped: {type(error).__name__}: {error}"
            context().actor_instance.abort(why)
            raise


async def outcomes(answers: list[Answer]) -> list[GenerationResult | RequestAborted]:
    """Return the outcome of each answer. Waits for all; cancelled, it aborts their requests."""
    try:
        await asyncio.gather(*answers, return_exceptions=True)
    finally:
        for answer in answers:
            answer.cancel()
    return [outcome(answer) for answer in answers]


def outcome(answer: Answer) -> GenerationResult | RequestAborted:
    """Return the result of a done answer, or the error of one that was aborted."""
    error = answer.exception()
    if isinstance(error, RequestAborted):
        return error
    return answer.result()
