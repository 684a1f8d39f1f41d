"""Hand-written teachers, trainer ranks and their host: they answer calls and write them down."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hinted
import torch

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.teacher_outputs.messages import (
    HeadHandle,
    TeacherOutputHandle,
    ViewKey,
    view_keys,
)
from composer_mesh.actors.trainer import TrainReply
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, RemoteError
from composer_mesh.mesh.transport import BufferHandle
from composer_mesh.mesh.weights.manifest import WeightManifest, WeightsHandle
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.packing import PackedBatch
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.step import MeshTraining
from composer_mesh.services.training.teaching import SdpoTeachers

Log = list[tuple[Any, ...]]
BUDGET = 512
NOWHERE = BufferHandle(None, 0, torch.uint8, (0,))


def weights(version: int) -> WeightsHandle:
    return WeightsHandle(version, WeightManifest(()), ())


class FakeActor:
    """Answers by its methods until it dies; a call under way ends with its death."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log, self.pid = name, log, 1000 + len(log)
        self.death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
        self.gates: dict[Any, asyncio.Event] = {}

    @property
    def alive(self) -> bool:
        return not self.death.done()

    def die(self) -> None:
        self.death.set_result(ActorDied(self.name, "killed"))

    def block(self, key: Any) -> asyncio.Event:
        """Let one thing that this actor does wait for the returned event."""
        return self.gates.setdefault(key, asyncio.Event())

    async def pass_gate(self, key: Any) -> None:
        if key in self.gates:
            await self.gates[key].wait()

    async def call(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        if not self.alive:
            raise ActorDied(self.name, "killed")
        task = asyncio.ensure_future(getattr(self, endpoint)(*args))
        await asyncio.wait([task, self.death], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise ActorDied(self.name, "killed")
        return task.result()


class FakeTeacher(FakeActor):
    """Serves signals that hold nothing; the gate of a turn number blocks its forward."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__(name, log)
        self.version, self.tickets, self.served = 0, 0, 0
        self.held: set[int] = set()
        self.error: Exception | None = None

    async def load(self, *_: Any) -> None:
        await self.pass_gate("load")
        self.log.append(("load", self.name))

    async def set_awake(self, awake: bool) -> None:
        self.log.append(("set_awake", self.name, awake))

    async def pull(self, handle: WeightsHandle) -> int:
        await self.pass_gate("pull")
        self.log.append(("pull", self.name, handle.version))
        self.version = handle.version
        return self.version

    async def teacher_output(
        self, step: int, views: list[HintedView], choice: Any
    ) -> TeacherOutputHandle:
        if self.error is not None:
            raise self.error from RemoteError(self.name, "teacher_output", "traceback")
        place, self.served = self.served, self.served + 1
        self.log.append(("teacher_output", self.name, view_keys(views), choice))
        await self.pass_gate(place)
        self.tickets += 1
        self.held.add(self.tickets)
        return TeacherOutputHandle(self.version, view_keys(views), self.tickets, (), NOWHERE, 0.0)

    async def release(self, ticket: int) -> None:
        self.held.remove(ticket)

    async def forget(self) -> None:
        self.log.append(("forget", self.name))
        self.held.clear()

    async def head(self) -> HeadHandle:
        self.log.append(("head", self.name))
        await self.pass_gate("head")
        return HeadHandle(self.version, (), NOWHERE, None)

    async def keep(self) -> int:
        self.log.append(("keep", self.name, self.version))
        return self.version

    async def write(self, draft: Path) -> list[WrittenFile]:
        await self.pass_gate("write")
        self.log.append(("write", self.name))
        return [WrittenFile(AVERAGE_FILE, 1, 2)]

    async def restore(self, version: int, file: Path | None) -> int:
        await self.pass_gate("restore")
        if self.error is not None:
            raise self.error from RemoteError(self.name, "restore", "traceback")
        self.log.append(("restore", self.name, version, file))
        self.version = version
        return version

    async def state(self) -> list[WeightsHandle]:
        self.log.append(("state", self.name))
        return [weights(self.version)]

    async def release_state(self) -> None:
        self.log.append(("release_state", self.name))

    async def adopt(self, handles: list[WeightsHandle]) -> int:
        await self.pass_gate("adopt")
        self.log.append(("adopt", self.name, handles[0].version))
        self.version = handles[0].version
        return self.version


class PublishingRank(FakeActor):
    """Publishes weights of a version that hold nothing."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(name, [])
        self.version = version

    async def publish(self) -> WeightsHandle:
        return weights(self.version)


class FakeRank(FakeActor):
    """Trains when it has the signals that it was told to expect, or when they are lost.

    The gate of a microbatch blocks the reading of its signals.
    """

    def __init__(self, name: str, log: Log, expects: int, taught: bool = True) -> None:
        super().__init__(name, log)
        self.expects, self.lost, self.taught = expects, "", taught
        self.taken: list[tuple[int, int, tuple[ViewKey, ...]]] = []
        self.error: Exception | None = None
        self.version = 0
        self._moved = asyncio.Event()

    async def train(self, packed: PackedBatch, teachers: int) -> TrainReply:
        batch = packed.unpack()
        batch.check_trains(self.version)
        self.log.append(("train", self.name, batch.step, teachers))
        while teachers and len(self.taken) < self.expects and not self.lost:
            self._moved.clear()
            await self._moved.wait()
        bytes_read = 10.0 * len(self.taken)
        self.version += 1
        lost = {"sdpo/lost_steps": 1} if self._loses(batch, teachers) else {}
        return TrainReply(
            {"loss/total": 1.0, **lost},
            {"sdpo/bytes": bytes_read, "sdpo/bytes_per_token": 7},
            [TurnDivergences(self.name, 0, array("f", [0.5]))] if self.taken else [],
        )

    def _loses(self, batch: StepBatch, teachers: int) -> bool:
        """Whether a step that should be taught by teachers of the mesh is not."""
        return bool(self.lost) or (self.taught and bool(batch.views) and not teachers)

    async def take_teacher_output(
        self, step: int, micro: int, part: int, handle: TeacherOutputHandle
    ) -> None:
        await self.pass_gate(micro)
        if self.error is not None:
            raise self.error
        self.log.append(("take", self.name, micro, part))
        self.taken.append((micro, part, handle.views))
        self._moved.set()

    async def take_head(self, handle: HeadHandle) -> None:
        self.log.append(("take_head", self.name, handle.version))

    async def student_choice(self, step: int, micro: int, part: int) -> str:
        return f"choice of {micro} for {part}"

    async def lose_teacher_outputs(self, step: int, reason: str) -> None:
        self.log.append(("lose", self.name, step))
        self.lost = reason
        self._moved.set()


class FakeHost:
    """Starts fake teachers; `prepare` may set up each before it is used."""

    name = "localhost"
    capacity_wait_s = 0.0

    def __init__(self, log: Log) -> None:
        self.log, self.prepare = log, _as_it_is
        self.started: list[FakeTeacher] = []
        self.where: list[str | None] = []

    async def spawn(
        self, name: str, _kind: Any, *, env: Any, policy: FaultPolicy, on: str | None = None
    ) -> FakeTeacher:
        assert policy is FaultPolicy.OWNER
        self.where.append(on)
        teacher = FakeTeacher(name, self.log)
        self.prepare(teacher)
        self.started.append(teacher)
        return teacher

    def lost(self, teacher: FakeTeacher, reason: str) -> None:
        self.log.append(("lost", teacher.name, reason))
        if teacher.alive:
            teacher.death.set_result(ActorDied(teacher.name, reason))

    async def stop(self, teacher: FakeTeacher) -> None:
        self.log.append(("stop", teacher.name))


def _as_it_is(_: FakeTeacher) -> None:
    return None


class Ring:
    """Fake teachers and ranks around the real services."""

    def __init__(
        self, config: Any, ranks: Sequence[int] = (0,), turn: asyncio.Event | None = None
    ) -> None:
        self.log: Log = []
        self.events: Log = []
        self.host = FakeHost(self.log)
        taught = config.sdpo.has_own_actors
        self.ranks = [
            FakeRank(f"trainer-{n}", self.log, count, taught) for n, count in enumerate(ranks)
        ]
        self.placements: dict[int, str] = {}
        self.sdpo = SdpoTeachers(config, self.host, self.placement, self.record, turn=turn)  # type: ignore[arg-type]

    def placement(self, number: int) -> ProcessPlacement:
        return ProcessPlacement(self.placements.get(number), {})

    def record(self, *event: str, **_: Any) -> None:
        self.events.append(event)

    async def begin(self) -> list[FakeTeacher]:
        await self.sdpo.start()
        await self.sdpo.load("folder")  # type: ignore[arg-type]
        self.log.clear()
        return list(self.host.started)

    def of(self, kind: str) -> Log:
        return [entry for entry in self.log if entry[0] == kind]

    async def settle(self) -> None:
        """Let everybody go on as far as the gates allow."""
        for _ in range(60):
            await asyncio.sleep(0)


def config(
    build_config: Any, restarts: int = 5, context: int = 1, epochs: int = 1, **sdpo: Any
) -> Any:
    divided = {"ranks": context, "context_parallel": context, "packing": context > 1}
    return build_config(
        sdpo={"alpha": 0.5, **sdpo},
        trainer={"microbatch_tokens": BUDGET, "epochs": epochs, **divided},
        supervision={"restarts": restarts, "backoff_s": 1e-9, "backoff_max_s": 1e-9},
    )


def batch(samples: int = 3, views: Sequence[HintedView] | None = None, step: int = 0) -> StepBatch:
    """Samples too long to share a microbatch; each has a view where nothing else is told."""
    own = [hinted.view(f"t{n}") for n in range(samples)]
    return hinted.batch([BUDGET] * samples, own if views is None else views, step=step)


def training(ring: Ring, settings: Any) -> MeshTraining:
    return MeshTraining(settings, lambda: ring.ranks, ring.sdpo)  # type: ignore[arg-type]
