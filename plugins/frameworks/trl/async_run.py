"""The actors that play rollouts for TRL's AsyncGRPOTrainer, on a loop in a thread of its own.

A run without a trainer (`services.partial_runs`): its generators get the weights that TRL sends,
and its groups go to TRL as samples. `async_grpo` has the side of the trainer's thread.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from torch import Tensor

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import LoopThread, cancel_and_wait, in_thread
from composer_mesh.mesh.weights.choice import choose, published_dtype
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.plugins.frameworks.trl.async_stream import MeshFailed, SampleQueues, SampleStream
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.directory.claim import claimed
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.partial_runs.command import PartialRun
from composer_mesh.services.run.assembly import FAILED
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.parts import RunParts, make_episode_order
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.schedule.stopping import STOPPED
from composer_mesh.services.service import Service
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.step import StaleReceiver
from composer_mesh.tasks.task import Task

T = TypeVar("T")


class WeightSender:
    """Publishes weights from this process, and has all generators pull them.

    A generator that starts later pulls the last ones before it serves.
    """

    def __init__(self, config: Config, generators: Service) -> None:
        self._state: Mapping[str, Tensor] = {}
        self._generators = generators
        self._publisher = WeightPublisher(
            lambda: self._state,
            transport=choose(config.weights),
            dtype=published_dtype(config),
            checksums=config.weights.checksums,
        )

    async def send(self, state: Mapping[str, Tensor], version: int) -> None:
        """Publish tensors as a version. Waits until each generator serves it."""
        self._state = state
        try:
            handle = await self._publisher.publish(version)
        finally:
            self._state = {}
        got = await self._generators.setup("pull", handle)
        if any(one != version for one in got):
            raise StaleReceiver(version, got)

    async def close(self) -> None:
        """Free the published copies."""
        await self._publisher.close()


@dataclass
class AsyncRun(PartialRun):
    """Generators, environments and rollout workers that serve TRL's trainer until `finish`."""

    queues: SampleQueues = field(kw_only=True)
    stream: SampleStream = field(init=False)
    weights: WeightSender = field(init=False)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: asyncio.Event = field(default_factory=asyncio.Event)
    _thresholds: tuple[int, int, int] = field(default_factory=gc.get_threshold)

    async def _work(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> None:
        self._collect_as_before()
        past = ResumeContents(poisoned=await in_thread(self.store.reading.poisoned))
        rollouts = RunParts(self.config, self.store, mesh, task, chat, self.event).rollouts(past)
        order = await in_thread(make_episode_order, self.config, task, past)
        groups = Groups(self.config, task, rollouts, self.store, None, None, {}, order=order)
        first = await in_thread(next_group, self.store.reading)
        self.stream = SampleStream(
            self.config, groups, rollouts.retries, self.queues, first, lambda: self.restarts
        )
        self.weights = WeightSender(mesh.config, mesh.generators)
        if (task_of_work := asyncio.current_task()) is not None:
            self.stopping.cancels(task_of_work)  # by `composer-mesh stop`
        self.ready.set()
        self.view.phase("playing rollouts")
        work = [asyncio.ensure_future(one) for one in (self.stream.run(), self._finished.wait())]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            if work[0].done():
                work[0].result()
        finally:
            self.stream.close()
            await cancel_and_wait(work)
            await groups.close()
            await rollouts.close()
            await self.weights.close()
        self.summary = f"weights of version {self.stream.version} were sent"

    def finish(self) -> None:
        """End the run; groups that have entered are abandoned."""
        self._finished.set()

    def _collect_as_before(self) -> None:
        """Undo what a controller sets: cyclic garbage of this process may hold tensors."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _steps_done(self) -> int:
        return self.stream.version if self.ready.is_set() else 0


def next_group(reader: RunReader) -> int:
    """Return the group after all that have entered in this directory."""
    return 1 + max((row.group_id for row in reader.groups()), default=-1)


class MeshThread:
    """An `AsyncRun` in a thread of its own, for a thread that blocks until its calls are answered.

    `root` is the directory of the run. Raises `MeshFailed` with the cause where the run has ended.
    """

    def __init__(
        self,
        config: Config,
        root: Path,
        queues: SampleQueues,
        make_run: Callable[..., AsyncRun] = AsyncRun,
    ) -> None:
        self._reported = False
        self._open = ExitStack()
        try:
            self._open.enter_context(claimed(root))
            store = self._open.enter_context(RunStore(root, config))
            view = RunView(config.run.name, config.run.steps, console=Console(quiet=True))
            self._open.enter_context(view)
            self._loop = LoopThread("mesh-rollouts")
            self._open.callback(self._loop.close)
            self._run = make_run(config, store, view, queues=queues)
            self._live = self._loop.run_blocking(_started(self._run.live()))
        except BaseException:
            self._open.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until all actors have loaded the initial policy."""
        self._call(self._run.ready.wait())

    def send(self, state: Mapping[str, Tensor], version: int) -> None:
        """Have all generators serve these weights as `version`. Waits for it."""
        self._call(self._send(state, version))

    def open(self) -> None:
        """Let groups enter from now on."""
        self._call(_called(self._run.stream.open))

    def pause(self) -> None:
        """Let no group enter until `open`. Waits until it is so."""
        self._call(_called(self._run.stream.pause))

    def taken(self) -> None:
        """Let groups enter in the place of samples that have been taken."""
        self._loop.loop.call_soon_threadsafe(self._run.stream.admit)

    def check(self, stale_after_s: float) -> None:
        """Raise where the run has ended, or no group was finished for so long."""
        if self._live.done():
            raise self._failed()
        self._run.stream.check(stale_after_s)

    def close(self) -> None:
        """End all processes of the run. Waits for it; raises a failure that was not reported."""
        with self._open:
            code = self._run.settled(self._loop.run_blocking(self._ended()))
            if code == FAILED and not self._reported:
                raise self._failed()

    async def _ended(self) -> int:
        """End the run and return its exit status; one that is still starting is cancelled."""
        if self._run.ready.is_set():
            self._run.finish()
        else:
            self._live.cancel()
        await asyncio.wait([self._live])
        return STOPPED if self._live.cancelled() else self._live.result()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_blocking(self._unless_ended(work))

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._live], return_when=asyncio.FIRST_COMPLETED)
            if self._live.done():
                raise self._failed()
            return task.result()
        finally:
            await cancel_and_wait([task])

    async def _send(self, state: Mapping[str, Tensor], version: int) -> None:
        await self._run.weights.send(state, version)
        self._run.stream.version = version

    def _failed(self) -> MeshFailed:
        self._reported = True
        why = self._run.failure or "it was stopped on request"
        return MeshFailed(f"the mesh that plays rollouts has ended: {why}")


async def _started(work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
    return asyncio.create_task(work)


async def _called(function: Callable[[], None]) -> None:
    function()
