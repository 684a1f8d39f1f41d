"""The generator actor: many requests at once, batched by the engine as they come.

Decoding is the engine's work; this file adds waiting: a loop that steps the engine in a thread
while there is work, and lets new weights in between two steps.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

from monarch.actor import concurrent_endpoint, context

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.actors.policy import load_model
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.weights.handle import StagedWeights, WeightsHandle
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Answer = asyncio.Future[GenerationResult]


class GeneratorActor(MeshActor):
    """One process with an engine.

    controller -- prompt ids --> GeneratorActor -- ids, log-probs, versions --> controller
    trainer == weights by RDMA ==> GeneratorActor
    """

    kind: ClassVar[str] = "generator"

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._pulls = asyncio.Lock()
        self._answers: set[Answer] = set()
        self._staged: tuple[StagedWeights, asyncio.Future[int]] | None = None
        self._tokens = 0

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy as version 0 and begin to serve."""
        model = await asyncio.to_thread(load_model, folder)
        self._engine = Engine(model, config.generator.max_concurrent, config.policy.max_context)
        self._receiver = WeightReceiver()
        self.policy_version = 0
        self._serving = asyncio.create_task(self._serve())

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample one continuation. Waits for its last token; others decode beside it."""
        return await self._submit(request)

    @concurrent_endpoint
    async def generate_many(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Sample a closed batch; all of it is admitted before the first token.

        The same batch on an idle generator gives the same answers to the last bit.
        """
        return await asyncio.gather(*[self._submit(request) for request in requests])

    @concurrent_endpoint
    async def pull(self, handle: WeightsHandle) -> int:
        """Take a published version over between two decode steps; returns it.

        Requests under way go on with the new weights, and with the old ones until then. Waits for
        the transfer and one decode step; a transfer that an earlier pull still waits for is given
        up, because its publisher may be gone.
        """
        self._receiver.abandon()
        async with self._pulls:
            staged = await self._receiver.receive(handle)
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._staged = (staged, done)
            self._wake.set()
            return await done

    def details(self) -> dict[str, int]:
        return {"outstanding": len(self._answers), "tokens": self._tokens}

    def _submit(self, request: GenerationRequest) -> Answer:
        if self._serving.done():
            raise RuntimeError(f"the engine has stopped: {self._serving.exception()!r}")
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()

        def done(result: GenerationResult) -> None:
            loop.call_soon_threadsafe(_resolve, answer, result)

        self._engine.submit(request, done)
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        self._wake.set()
        return answer

    async def _serve(self) -> None:
        """Step the engine while there is work; a fault of the engine is the actor's end.

        Who waits then hears of its death, and may ask another generator the same.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._engine.busy or self._staged is not None:
                    await self._turn()
                self.activity = "idle"
        except Exception as error:  # supervision boundary: nobody may wait for a dead engine
            why = f"its engine stopped: {type(error).__name__}: {error}"
            context().actor_instance.abort(why)
            raise

    async def _turn(self) -> None:
        if self._staged is not None:
            (staged, done), self._staged = self._staged, None
            await asyncio.to_thread(self._engine.swap, staged)
            self.policy_version = staged.version
            done.set_result(staged.version)
            return
        self.activity = f"decoding {self._engine.outstanding} requests"
        self._tokens += await asyncio.to_thread(self._engine.step)


def _resolve(answer: Answer, result: GenerationResult) -> None:
    if not answer.done():
        answer.set_result(result)
