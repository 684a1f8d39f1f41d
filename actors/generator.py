"""The generator actor: serves many concurrent requests, continuously batched by its engine.

The engine decodes and `EngineLoop` decides when it steps; the actor adds requests, weight pulls and
the handling of engine failures.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint, context

from composer_mesh.actors.engines.loop import Answer, BatchRounds, EngineLoop, EngineThread
from composer_mesh.actors.engines.port import GenerationEngine, RequestAborted, make_engine
from composer_mesh.actors.models.device_memory import ASLEEP, its_turn
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.receiver import StagedWeights, WeightReceiver
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
        self._make: Callable[[], GenerationEngine] | None = None
        self._pulls = asyncio.Lock()
        self._loop: EngineLoop | None = None
        self._built = asyncio.Event()
        self._staged: StagedWeights | None = None
        self._rounds = BatchRounds(self._ask_together)

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path, awake: bool = True) -> None:
        """Load the policy as version 0 and start serving, unless it is not `awake`.

        Then the first `set_awake` does it; what is requested before waits.
        """
        self._make = partial(make_engine, config, folder)
        self._receiver, self.policy_version = WeightReceiver(), 0
        if awake:
            await self._build()

    async def _build(self) -> EngineLoop:
        assert self._make is not None
        loop = self._loop = EngineLoop(await self._thread.run(self._make), self._thread)
        self._serving = asyncio.create_task(self._serve(loop))
        self._built.set()
        return loop

    @concurrent_endpoint
    async def set_awake(self, awake: bool) -> None:
        """Give the device up to others, or take it back and serve the newest version pulled.

        Running requests wait and continue. Waits for one decode step and for the copies; a transfer
        that a pull still waits for is abandoned.
        """
        self._receiver.abandon()
        async with self._pulls:
            loop = None if self._loop is None else self._running(self._loop)
            staged = self._staged
            if loop is None and awake:
                loop = await self._build()
                if staged is not None:
                    await loop.swap(staged)
            elif loop is not None and awake and loop.asleep:
                await loop.wake(staged)
            elif loop is not None and not awake and not loop.asleep:
                entries = () if staged is None else staged.manifest.entries
                await loop.sleep({name for one in entries for name in one.names})

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one continuation. Waits for its last token; others decode concurrently.

        A cancelled call aborts its request. Raises `RequestAborted` if another call did, or sent
        the same id again, and `DecodingDeadlineExceeded` after the request's own deadline.
        """
        return await (await self._serving_loop()).ask(request)

    @concurrent_endpoint
    async def generate_many(
        self, requests: list[GenerationRequest], continues: bool = False
    ) -> list[GenerationResult | RequestAborted]:
        """Sample a closed batch; all requests are admitted before the first token.

        The same batch on an idle generator gives bit-identical results. So does the same sequence
        of batches where each but the first `continues` the one before it, that is, reuses its
        prefixes. A request that is aborted has its error in place of its result.
        """
        loop = await self._serving_loop()
        return await outcomes(loop.ask_together(requests, continues=continues))

    @concurrent_endpoint
    async def abort(self, request_ids: list[str]) -> int:
        """Abort requests, whose callers get `RequestAborted`; return how many were unanswered.

        Does not wait. Their slots are free after the decode step under way; ids that are unknown or
        answered are ignored.
        """
        loop = await self._serving_loop()
        return sum(loop.abort(request_id, "its caller requested it") for request_id in request_ids)

    @concurrent_endpoint
    async def generate_round(
        self, number: int, size: int, requests: list[GenerationRequest], continues: bool
    ) -> list[GenerationResult | RequestAborted]:
        """Sample one caller's share of a closed batch of `size` requests, as `generate_many` does.

        Waits until all shares have arrived, or `close_round`.
        """
        await self._serving_loop()
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
        gone. While the engine sleeps, the version stays on the host until it is awake.
        """
        self._receiver.abandon()
        async with self._pulls:
            staged = self._staged = await self._receiver.receive(handle)
            if self._loop is not None and not self._loop.asleep:
                await self._running(self._loop).swap(staged)
            self.policy_version = staged.version
            return staged.version

    def details(self) -> dict[str, Any]:
        loop = self._loop
        if loop is None:
            return {"outstanding": 0, "tokens": 0}
        waiting, tokens = loop.outstanding, loop.engine.prompt_tokens
        activity = f"decoding {waiting} requests" if waiting else "idle"
        if loop.asleep:
            activity = ASLEEP
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
        assert self._loop is not None  # each share has waited for it
        return self._running(self._loop).ask_together(requests, continues=continues)

    async def _serving_loop(self) -> EngineLoop:
        """Return the loop of the engine. Waits until it is built."""
        if self._make is None:
            raise RuntimeError("the generator has no engine: call load first")
        await its_turn(self._built)
        assert self._loop is not None
        return self._running(self._loop)

    def _running(self, loop: EngineLoop) -> EngineLoop:
        if self._serving.done():
            raise RuntimeError(f"the engine has stopped: {self._serving.exception()!r}")
        return loop

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
