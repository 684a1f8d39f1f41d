"""The SDPO teachers of a run: fed with views, their signals brought to the trainer, replaced.

Each teacher works through its share of a step in the order in which the trainer will need it, one
microbatch ahead of what travels, so that its forward runs beside the trainer's work. Bytes move
between the actors; here are only calls.

    teacher j   signal 0   signal 1   signal 2  ...
    delivery               0 -> rank  1 -> rank ...
    trainer                           trains 0  ...

A teacher that dies is replaced. The step under way is trained without the channel, or waits for
the replacement, as `sdpo.when_lost` says.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.actors.signals import SignalHandle
from composer_mesh.actors.sources import asks_the_student, has_own_head
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost, SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, cancel_and_wait, together
from composer_mesh.mesh.weights import WeightsHandle
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, split_views

Record = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Request:
    """One teacher's part of one microbatch of one trainer rank."""

    rank: int
    microbatch: int
    part: int
    views: list[HintedView]


class _Lost(Exception):
    """A step's signals are given up."""


class SdpoTeachers:
    """The teachers' processes and the work between them and the trainer's ranks."""

    def __init__(self, config: Config, host: MeshHost, env: dict[str, str], record: Record) -> None:
        self._config, self._host, self._env, self._record = config, host, env, record
        self._deadline_s = config.run.deadline_s
        self._teachers: list[SpawnedActor | None] = [None] * config.sdpo.replicas
        self._folder: Path | None = None
        self._latest: WeightsHandle | None = None
        self._syncing = asyncio.Lock()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self.restarts = 0

    async def start(self) -> None:
        """Start every teacher's process. Waits until all answer."""
        places = range(len(self._teachers))
        self._teachers = list(await together(*(self._spawn(place) for place in places)))

    async def load(self, folder: Path) -> None:
        """Load the initial policy everywhere."""
        self._folder = folder
        await asyncio.gather(*(self._load(teacher) for teacher in self._alive()))

    async def close(self) -> None:
        """End replacements under way."""
        await cancel_and_wait(self._replacing.values())

    async def pull(self, handle: WeightsHandle) -> list[int]:
        """Let every living teacher follow to a version; returns what they serve."""
        async with self._syncing:
            self._latest = handle
            found = [await self._pull(teacher, handle) for teacher in self._alive()]
        return [version for version in found if version is not None]

    async def ready(self) -> list[SpawnedActor]:
        """The teachers for a step. Waits for replacements where the step shall."""
        for place, teacher in enumerate(self._teachers):
            if teacher is not None and not teacher.alive:
                self._replace(place, teacher)
        if self._config.sdpo.when_lost == "wait":
            await asyncio.gather(*self._replacing.values())
        return self._alive()

    async def feed(
        self,
        batch: StepBatch,
        plans: Sequence[RankPlan],
        teachers: Sequence[SpawnedActor],
        ranks: Sequence[SpawnedActor],
    ) -> None:
        """Bring a step's signals to the trainer's ranks. Waits until all were read, or given up."""
        await self._bring_head(teachers[0], ranks)
        shares = [requests_for(part, batch, plans, len(teachers)) for part in range(len(teachers))]
        work = _StepWork(self._config, batch.step, ranks, self._deadline_s)
        try:
            await together(
                *(self._serve(work, t, share) for t, share in zip(teachers, shares, strict=True))
            )
        except _Lost as lost:
            self._record("sdpo_lost", "", f"step {batch.step + 1}: {lost}")
            await asyncio.gather(*(work.lose(rank, str(lost)) for rank in ranks))

    async def _serve(
        self, work: "_StepWork", teacher: SpawnedActor, requests: Sequence[Request]
    ) -> None:
        """One teacher's share, taken over by its replacement where the step waits for it."""
        left = list(requests)
        while left:
            try:
                await work.run(teacher, left)
            except ActorDied as died:
                if died.actor != teacher.name:
                    raise
                place = self._teachers.index(teacher)
                replacing = self._replace(place, teacher)
                if self._config.sdpo.when_lost == "skip":
                    raise _Lost(str(died)) from None
                await replacing
                replacement = self._teachers[place]
                assert replacement is not None
                teacher = replacement

    async def _bring_head(self, teacher: SpawnedActor, ranks: Sequence[SpawnedActor]) -> None:
        """The teachers' own head travels once for each version."""
        if not has_own_head(self._config.sdpo):
            return
        head = await teacher.call("head", deadline_s=self._deadline_s)
        await asyncio.gather(
            *(rank.call("take_head", head, deadline_s=self._deadline_s) for rank in ranks)
        )

    def _alive(self) -> list[SpawnedActor]:
        return [teacher for teacher in self._teachers if teacher is not None and teacher.alive]

    async def _spawn(self, place: int) -> SpawnedActor:
        count = len(self._teachers)
        name = "sdpo_teacher" if count == 1 else f"sdpo_teacher-{place}"
        return await self._host.spawn(
            name, SDPOTeacherActor, env=self._env, policy=FaultPolicy.OWNER
        )

    async def _load(self, teacher: SpawnedActor) -> None:
        await teacher.call("load", self._config, self._folder, deadline_s=self._deadline_s)

    async def _pull(self, teacher: SpawnedActor, handle: WeightsHandle) -> int | None:
        try:
            version: int = await teacher.call("pull", handle, deadline_s=self._deadline_s)
        except ActorDied:
            self._replace(self._teachers.index(teacher), teacher)
            return None
        return version

    def _replace(self, place: int, dead: SpawnedActor) -> asyncio.Task[None]:
        """Start another process for a dead teacher, once."""
        if self._teachers[place] is dead:
            self._teachers[place] = None
            self._replacing[place] = asyncio.create_task(self._replacement(place, dead))
        return self._replacing[place]

    async def _replacement(self, place: int, dead: SpawnedActor) -> None:
        await self._host.stop(dead)
        teacher = await self._spawn(place)
        await self._load(teacher)
        async with self._syncing:
            detail = await self._catch_up(teacher)
            self._teachers[place] = teacher
        self.restarts += 1
        self._record("actor_restarted", teacher.name, f"process {teacher.pid}, {detail}")

    async def _catch_up(self, teacher: SpawnedActor) -> str:
        """Bring a replacement to where the other teachers are; says how."""
        if self._latest is None:
            return "at version 0"
        version = self._latest.version
        if self._config.sdpo.teacher != "ema":
            await teacher.call("pull", self._latest, deadline_s=self._deadline_s)
            return f"at version {version}"
        others = self._alive()
        if others:
            state = await others[0].call("state", deadline_s=self._deadline_s)
            await teacher.call("adopt", state, deadline_s=self._deadline_s)
            return f"at version {version}, its average taken from {others[0].name}"
        await teacher.call("adopt", [self._latest], deadline_s=self._deadline_s)
        return f"at version {version}, its average begins again there"


class _StepWork:
    """The calls that bring the signals of one step from teachers to ranks."""

    def __init__(
        self, config: Config, step: int, ranks: Sequence[SpawnedActor], deadline_s: float
    ) -> None:
        self._asks_student = asks_the_student(config.sdpo)
        self._step, self._ranks, self._deadline_s = step, ranks, deadline_s

    async def run(self, teacher: SpawnedActor, left: list[Request]) -> None:
        """Serve requests in order, taking each from `left` once it was delivered.

        The teacher computes the next signal while the one before is delivered.
        """
        delivering: asyncio.Task[None] | None = None
        try:
            for request in list(left):
                handle = await self._signal(teacher, request)
                if delivering is not None:
                    await delivering
                delivering = asyncio.create_task(self._deliver(teacher, request, handle, left))
            if delivering is not None:
                await delivering
        finally:
            if delivering is not None:
                await cancel_and_wait([delivering])

    async def lose(self, rank: SpawnedActor, reason: str) -> None:
        """Tell a rank that nothing more will come."""
        await rank.call("lose_signals", self._step, reason, deadline_s=self._deadline_s)

    async def _signal(self, teacher: SpawnedActor, request: Request) -> SignalHandle:
        choice: Any = None
        if self._asks_student:
            choice = await self._ranks[request.rank].call(
                "student_choice",
                self._step,
                request.microbatch,
                request.part,
                deadline_s=self._deadline_s,
            )
        handle: SignalHandle = await teacher.call(
            "signal", self._step, request.views, choice, deadline_s=self._deadline_s
        )
        return handle

    async def _deliver(
        self, teacher: SpawnedActor, request: Request, handle: SignalHandle, left: list[Request]
    ) -> None:
        try:
            await self._ranks[request.rank].call(
                "take_signal",
                self._step,
                request.microbatch,
                request.part,
                handle,
                deadline_s=self._deadline_s,
            )
            left.remove(request)
        finally:
            if teacher.alive:
                await teacher.call("release", handle.ticket, deadline_s=self._deadline_s)


def requests_for(
    part: int, batch: StepBatch, plans: Sequence[RankPlan], teachers: int
) -> list[Request]:
    """One teacher's share of a step, in the order in which the ranks will need it."""
    found: list[tuple[int, Request]] = []
    for rank, plan in enumerate(plans):
        wanted = [(i, m) for i, m in enumerate(plan.microbatches) if m.views]
        for turn, (index, microbatch) in enumerate(wanted):
            views = [batch.views[place] for place in microbatch.views]
            run = split_views(views, teachers)[part]
            if len(run):
                found.append((turn, Request(rank, index, part, views[run.start : run.stop])))
    return [request for _, request in sorted(found, key=lambda one: (one[0], one[1].rank))]
