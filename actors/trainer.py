"""The trainer actor: owns the trained weights, runs optimizer steps, publishes each version.

Losses are in `learning.step`; the controller decides who gets a version and when.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.models.device_memory import ASLEEP
from composer_mesh.actors.models.rank_actor import RankActor
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.actors.teacher_outputs.messages import HeadHandle, TeacherOutputHandle
from composer_mesh.actors.teacher_outputs.sources import InlineSource, LostSource, MeshSource
from composer_mesh.configs.schema import Config
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.task_resources import serving
from composer_mesh.mesh.transport import BufferHandle
from composer_mesh.mesh.weights.choice import choose, published_dtype
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.packing import PackedBatch
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.tasks.loading import make_task

Source = InlineSource | MeshSource | LostSource


@dataclass(frozen=True)
class TrainReply:
    """The metrics of a step, equal on all ranks, and this rank's own figures and divergences."""

    metrics: dict[str, Any]
    figures: dict[str, float]
    divergences: list[TurnDivergences] = field(default_factory=list)
    new_events: list[tuple[str, str]] = field(default_factory=list)
    """Events of an island's rounds: kind and text."""


class TrainerActor(RankActor):
    """One rank: the model, its optimizer and, if a loss needs one, a frozen reference.

    controller -- StepBatch, TeacherOutputHandle --> TrainerActor -- WeightsHandle --> controller
    """

    kind: ClassVar[str] = "trainer"

    def __init__(self) -> None:
        super().__init__()
        self._order = asyncio.Lock()
        self._held = UpdateGate()
        self._details: dict[str, Any] = {}
        self._writing: asyncio.Task[list[WrittenFile]] | None = None
        self._custom = RunningCall(SupervisionConfig().custom_function_s)

    @concurrent_endpoint
    async def prepare(self, config: Config) -> Path:
        """Create or find the initial policy; return its folder. Waits for the warm start."""

        def report(text: str) -> None:
            self.activity = f"warm start: {text}"

        def work() -> Path:
            return prepare_policy(config, make_task(config), report, serving)

        self.activity = "preparing the policy"
        folder = await asyncio.to_thread(work)
        self.activity = "idle"
        return folder

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path, checkpoint: Path | None = None) -> int:
        """Load the initial policy, then optionally restore a checkpoint; return the version.

        The initial policy is version 0. It is always loaded, as losses compare with it. An island
        then waits for the common weights.
        """
        await asyncio.to_thread(self._build, config, folder)
        if checkpoint is None:
            await asyncio.to_thread(self._learner.join_islands)
        else:
            await asyncio.to_thread(self._learner.restore, checkpoint)
        self.policy_version = self._learner.version
        return self.policy_version

    def _build(self, config: Config, folder: Path) -> None:
        if self._ranks.size == 1:
            self._ranks = Ranks(device=own_device())
        self._custom = RunningCall(config.supervision.custom_function_s)
        self._learner = Learner(config, folder, self._ranks, self._custom)
        self._publisher = WeightPublisher(
            self._learner.published,
            transport=choose(config.weights),
            dtype=published_dtype(config),
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            checksums=config.weights.checksums,
        )
        self._config = config.sdpo
        self._teacher_outputs = MeshSource(config.sdpo, config.trainer.updates)
        sharding = "fsdp2" if config.trainer.sharded else "none"
        self._details = {"sharding": sharding, "device": str(self._ranks.device)}

    @concurrent_endpoint
    async def train(self, packed: PackedBatch, teachers: int = 0) -> TrainReply:
        """Run an optimizer step from version v to v + 1; waits for teacher outputs and ranks.

        Steps run one at a time, in call order. The step's outputs of `teachers` SDPO teachers
        arrive through `take_teacher_output`, before or after this call. Raises once a call of a
        custom loss is late; its thread runs on, so this process is of no more use.
        """
        async with self._order:
            batch = await asyncio.to_thread(packed.unpack)
            self.activity = f"training step {batch.step + 1}"
            source = await self._source(batch, teachers)
            training = asyncio.to_thread(self._learner.train, batch, source, self._held.wait)
            metrics = await self._custom.wait_for(training)
            self.policy_version = self._learner.version
            self.activity = "idle"
            figures = {} if source is None else source.figures()
            learner = self._learner
            return TrainReply(metrics, figures, learner.divergences, learner.new_events())

    @concurrent_endpoint
    async def set_awake(self, awake: bool) -> None:
        """Give the device up to others, or take it back. Waits for a running step or weight copy.

        Weights and optimizer state are bit for bit what they were; gradients are cleared.
        """
        async with self._order:
            await asyncio.to_thread(self._held.wait)
            await asyncio.to_thread(self._learner.set_awake, awake)
            self.activity = "idle" if awake else ASLEEP

    def details(self) -> dict[str, Any]:
        return self._details

    async def _source(self, batch: StepBatch, teachers: int) -> Source | None:
        if not (self._config.on and batch.views):
            return None
        if self._learner.teaches_itself:
            return await asyncio.to_thread(self._learner.own_teacher_outputs, batch)
        if not teachers:
            return LostSource()
        plan = await asyncio.to_thread(self._learner.step.view_plan, batch)
        await self._teacher_outputs.begin(batch, plan, teachers, self._learner.version)
        return self._teacher_outputs

    @concurrent_endpoint
    async def take_teacher_output(
        self, step: int, microbatch: int, part: int, handle: TeacherOutputHandle
    ) -> None:
        """Read one teacher's part of a microbatch. Waits until training comes near it.

        On return the teacher may overwrite the output's memory.
        """
        await self._teacher_outputs.deliver(step, microbatch, part, handle)

    @concurrent_endpoint
    async def take_head(self, handle: HeadHandle) -> None:
        """Read the head for the teachers' hidden states."""
        await self._teacher_outputs.take_head(handle)

    @concurrent_endpoint
    async def student_choice(self, step: int, microbatch: int, part: int) -> BufferHandle:
        """Return a handle to the student's top k ids of a part. Waits for the student."""
        return await self._teacher_outputs.choice(step, microbatch, part)

    @concurrent_endpoint
    async def lose_teacher_outputs(self, step: int, reason: str) -> None:
        """Report that this step's outputs are lost: it is trained without the SDPO channel."""
        await self._teacher_outputs.lose(step, reason)

    @concurrent_endpoint
    async def hold(self) -> int:
        """Block updates of the current version until `publish` has copied it; return the version.

        Waits for a running step. The next step may be requested once this has returned.
        """
        return await self._hold()

    @concurrent_endpoint
    async def publish(self) -> WeightsHandle:
        """Publish the held version, or else the current one, concurrently with the next step.

        That step's update waits for the copy. The previous version stays readable.
        """
        if not self._held.held:
            await self._hold()
        return await self._held.copied(self._publisher.publish)

    async def _hold(self) -> int:
        async with self._order:
            assert self.policy_version is not None
            self._held.hold(self.policy_version)
            return self.policy_version

    @concurrent_endpoint
    async def save(self, draft: Path, export: bool) -> None:
        """Start writing a checkpoint into a folder; with `export` also as a model folder.

        Collective over all ranks. Waits for a running step or weight copy, and until the state is
        copied; the copy is then written concurrently with later steps. One checkpoint at a time:
        call `saved` before the next `save`.
        """
        async with self._order:
            await asyncio.to_thread(self._held.wait)
            self.activity = "copying its state"
            await asyncio.to_thread(self._learner.copy, export)
            self.activity = "idle"
        self._writing = asyncio.create_task(asyncio.to_thread(self._learner.write, draft, export))

    @concurrent_endpoint
    async def saved(self) -> list[WrittenFile]:
        """Return the files this rank has written since `save`. Waits until they are on disk.

        Raises `CheckpointFailed` if they could not be written.
        """
        if self._writing is None:
            raise RuntimeError("saved comes after save, and there was none")
        return await asyncio.shield(self._writing)


T = TypeVar("T")


class UpdateGate:
    """Delays updates of the weights until a version of them has been copied.

    It is held from one event loop and waited for in any thread.

    loop      hold(v) ......... copied(publish) --> handle
    thread        forward, backward .... wait | update to v + 1
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._version = -1

    @property
    def held(self) -> bool:
        """Whether a version waits for its copy, or is being copied."""
        return not self._free.is_set()

    def hold(self, version: int) -> None:
        """Block updates until this version was copied."""
        self._version = version
        self._free.clear()

    async def copied(self, copy: Callable[[int], Awaitable[T]]) -> T:
        """Copy the held version, then release updates, also where the copy fails."""
        try:
            return await copy(self._version)
        finally:
            self._free.set()

    def wait(self) -> None:
        """Block this thread until no version is held."""
        self._free.wait()
