"""Actors of `sdpo_transport.py`: the run's own code paths, with simulated compute.

Teacher outputs are real tensors of the configured sizes, made once from random states. A sleeping
teacher's or trainer's compute is a sleep, which takes no core from the transfers; everything else
(buffers, tickets, output buffer, versions, calls) is inherited. Measures nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor, nn

from composer_mesh.actors.learning.update_pass import TeacherOutputSource
from composer_mesh.actors.sdpo_teacher import FIRST_CAPACITY, SLOTS, SDPOTeacherActor
from composer_mesh.actors.teacher_outputs.messages import (
    Head,
    Layout,
    SlotPool,
    make_teacher_output,
    pack,
    unpack,
)
from composer_mesh.actors.teacher_outputs.sources import MeshSource
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import record_nothing
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.mesh.weights.choice import choose
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, plan_step
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.teaching import SdpoTeachers

FORWARD = 1 / 3
"""Share of a trainer's microbatch that is done before it needs the teacher output."""


@dataclass(frozen=True)
class Shape:
    """Rows of a teacher output, and the dimensions of the model that it comes from."""

    tokens: int
    hidden: int
    vocabulary: int


def some_signal(config: SdpoConfig, shape: Shape) -> dict[str, Tensor]:
    """Make a teacher output of random states and a random head, as a teacher does."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(shape.tokens, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator)
    return make_teacher_output(config, states, Head(weight, None), targets)


class SignalSender(MeshActor):
    """Holds one packed teacher output and sends it either way."""

    kind: ClassVar[str] = "signal_sender"

    @concurrent_endpoint
    async def load(self, config: SdpoConfig, shape: Shape) -> tuple[Layout, ...]:
        """Make the teacher output; return the layout of its tensors in the packed bytes."""
        layout, self._packed = pack(some_signal(config, shape))
        self._buffer = SendBuffer(FIRST_CAPACITY)
        return layout

    @concurrent_endpoint
    async def offer(self) -> BufferHandle:
        """Write the teacher output into registered memory; return its handle."""
        return await self._buffer.write(self._packed)

    @concurrent_endpoint
    async def send(self) -> Tensor:
        """Return the teacher output itself, inside the answer."""
        return self._packed


class SignalReader(MeshActor):
    """Receives teacher outputs either way and drops them."""

    kind: ClassVar[str] = "signal_reader"

    @concurrent_endpoint
    async def fetch(self, layout: tuple[Layout, ...], handle: BufferHandle) -> None:
        """Read a teacher output one-sidedly, as the trainer does."""
        unpack(layout, await read(handle))

    @concurrent_endpoint
    async def accept(self, layout: tuple[Layout, ...], packed: Tensor) -> None:
        """Accept a teacher output that was sent inside the call."""
        unpack(layout, packed)


class _SleepingModel:
    """A teacher whose forward takes a fixed number of seconds."""

    def __init__(self, config: SdpoConfig, shape: Shape, seconds: float) -> None:
        self.version = 0
        self._teacher_output, self._seconds = some_signal(config, shape), seconds

    def absorb(self, version: int, _blend: Any) -> None:
        self.version = version

    def teacher_output(
        self, views: Sequence[HintedView], _choice: Tensor | None = None
    ) -> dict[str, Tensor]:
        time.sleep(self._seconds)
        rows = sum(len(view.targets) for view in views)
        return {name: tensor[:rows] for name, tensor in self._teacher_output.items()}


class SleepingTeacher(SDPOTeacherActor):
    """The SDPO teacher with a simulated forward."""

    def __init__(self, shape: Shape, seconds: float) -> None:
        super().__init__()
        self._shape, self._seconds = shape, seconds

    @concurrent_endpoint
    async def load(self, config: Config, _folder: Path) -> None:
        """Set up what the teacher's own `load` does, without a policy."""
        self._teacher: Any = _SleepingModel(config.sdpo, self._shape, self._seconds)
        self._follows = config.sdpo.follows_trainer
        self._receiver = WeightReceiver()
        self._slots = SlotPool(SLOTS, FIRST_CAPACITY)
        self.policy_version = 0


class _SleepingStep:
    """A step with microbatches of fixed duration, partly before the teacher output's use."""

    def __init__(self, config: Config, seconds: float) -> None:
        self._budget, self._seconds = config.trainer.microbatch_tokens, seconds

    def view_plan(self, batch: StepBatch) -> RankPlan:
        return plan_step(batch, self._budget)[0]

    def run(self, batch: StepBatch, source: TeacherOutputSource) -> dict[str, float]:
        began = time.perf_counter()
        for index, microbatch in enumerate(self.view_plan(batch).microbatches):
            time.sleep(self._seconds * FORWARD)
            if microbatch.views:
                views = [batch.views[place] for place in microbatch.views]
                source.take(index, views, lambda: torch.empty(0))
            time.sleep(self._seconds * (1 - FORWARD))
        return {"time/step_s": time.perf_counter() - began}


class _SleepingLearner:
    """A rank whose steps only take time."""

    teaches_itself = False

    def __init__(self, config: Config, seconds: float) -> None:
        self.step, self.version = _SleepingStep(config, seconds), 0
        self.divergences: list[TurnDivergences] = []

    def new_events(self) -> list[tuple[str, str]]:
        return []

    def train(
        self, batch: StepBatch, source: TeacherOutputSource, before_update: Callable[[], object]
    ) -> dict[str, float]:
        metrics = self.step.run(batch, source)
        before_update()
        self.version += 1
        return metrics


class SleepingTrainer(TrainerActor):
    """The trainer with its real teacher output buffer, and simulated forward and backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @concurrent_endpoint
    async def load(self, config: Config, _folder: Path) -> None:
        """Set up what the trainer's own `load` does, with two numbers as its weights."""
        self._learner: Any = _SleepingLearner(config, self._seconds)
        transport = choose(config.weights)
        self._publisher = WeightPublisher(nn.Linear(1, 1).state_dict, transport=transport)
        self._config = config.sdpo
        self._teacher_outputs = MeshSource(config.sdpo)
        self.policy_version = 0


class SleepingTeachers(SdpoTeachers):
    """The run's teachers, replaced by sleeping ones."""

    def __init__(self, config: Config, host: MeshHost, shape: Shape, seconds: float) -> None:
        where = config, host, lambda _: ProcessPlacement(), record_nothing
        super().__init__(*where, SleepingTeacher, (shape, seconds))
