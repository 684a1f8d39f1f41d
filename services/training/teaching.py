"""The SDPO teachers of a run: sends them views, delivers their outputs, replaces them.

Each teacher computes its share of a step in the order in which the trainer needs it, two requests
ahead of the transfers, so that its forward overlaps training. Tensors move between the actors; only
calls are made here.

    teacher j   output 0   output 1   output 2  ...
    delivery               0 -> rank  1 -> rank ...
    trainer                           trains 0  ...

A teacher that dies, fails or is late is replaced, within the restart budget of its slot. The
running step is trained without the channel, or waits for the replacement, as `sdpo.when_lost` says.
If a slot's budget is spent the others continue; without any teacher, the run ends.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.background import BackgroundTasks
from composer_mesh.mesh.failures import cause_of, error_key, is_deterministic, recorded_by
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied, MeshError, Recorder, RemoteError
from composer_mesh.mesh.waiting import together
from composer_mesh.mesh.weights.handle import WeightsHandle
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan
from composer_mesh.services.pool.process_placement import PlacementOf
from composer_mesh.services.pool.restart_manager import GivenUp, restart
from composer_mesh.services.pool.restarts import RestartBudget, RestartRules
from composer_mesh.services.pool.setups import TELL_S
from composer_mesh.services.pool.wait_for_capacity import spawn_on, wait_for_capacity
from composer_mesh.services.training.teacher_output_requests import Request, StepWork, requests_for

Record = Callable[[str, str, str], None]


class _Lost(Exception):
    """The teacher outputs of a step are given up."""


class SdpoTeachers:
    """The SDPO teachers' processes, and the transfers from them to the trainer's ranks."""

    def __init__(
        self, config: Config, host: MeshHost, placement: PlacementOf, record: Recorder
    ) -> None:
        self._config, self._host, self._placement, self._record = config, host, placement, record
        self._deadline_s = config.run.deadline_s
        count = config.sdpo.replicas
        self._names = [f"sdpo_teacher-{n}" for n in range(count)] if count > 1 else ["sdpo_teacher"]
        self._teachers: list[SpawnedActor | None] = [None] * count
        self._folder: Path | None = None
        self._latest: WeightsHandle | None = None
        self._source: SpawnedActor | None = None
        self._published = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._tasks = BackgroundTasks(self._not_replaced)
        self._replacing: dict[int, asyncio.Task[None]] = {}
        rules = RestartRules.of(config.supervision, config.run.seed)
        self._budgets = [RestartBudget(rules, name) for name in self._names]
        self._errors: dict[int, str] = {}
        self._frozen_head_brought = False
        self.restarts = 0

    async def start(self) -> None:
        """Start every teacher's process. Waits until all answer."""
        self._teachers = list(await together(*map(self._spawn, self._names)))

    async def load(self, folder: Path) -> None:
        """Load the initial policy in every teacher."""
        self._folder = folder
        await asyncio.gather(*(self._load(teacher) for teacher in self.alive()))

    async def close(self) -> None:
        """Cancel running replacements."""
        await self._tasks.close()

    async def pull(self, handle: WeightsHandle, source: SpawnedActor | None = None) -> list[int]:
        """Make every living teacher pull a version; return the versions they serve.

        `source` is the actor that published it: `ActorDied` is raised if it dies.
        """
        async with self._syncing:
            self._latest, self._source = handle, source
            self._published.set()
            pulls = [self._pull(teacher, handle, source) for teacher in self.alive()]
            found = await asyncio.gather(*pulls)
        return [version for version in found if version is not None]

    async def forget(self) -> None:
        """Drop what was delivered or requested for ranks that have been replaced."""
        self._frozen_head_brought = False
        await asyncio.gather(*(self._forget(teacher) for teacher in self.alive()))

    async def ready(self, step: int) -> list[SpawnedActor]:
        """Return the teachers for a step. Waits for replacements if `sdpo.when_lost` is "wait".

        Raises the error of a failed replacement if no teacher is left.
        """
        for place, teacher in enumerate(self._teachers):
            if teacher is not None and not teacher.alive:
                self._replace(place, teacher)
        wait = self._config.sdpo.when_lost == "wait"
        awaited = [task for task in self._replacing.values() if wait or task.done()]
        ended = await asyncio.gather(*awaited, return_exceptions=True)
        alive = self.alive()
        if not alive and all(task.done() for task in self._replacing.values()):
            for error in (one for one in ended if isinstance(one, BaseException)):
                raise error
        if not alive:
            self._record("sdpo_lost", "", f"step {step + 1}: no SDPO teacher is alive")
        return alive

    async def feed(
        self,
        batch: StepBatch,
        plans: Sequence[RankPlan],
        teachers: Sequence[SpawnedActor],
        ranks: Sequence[SpawnedActor],
    ) -> None:
        """Deliver a step's teacher outputs to the ranks. Waits until all are read or given up."""
        count = len(teachers)
        shares = [requests_for(place, batch, plans, count) for place in range(count)]
        work = StepWork(self._config, batch.step, ranks, self._deadline_s)
        try:
            if not self._frozen_head_brought:
                await self._insist(teachers[0], work.bring_head)
                self._frozen_head_brought = self._config.sdpo.teacher == "frozen"
            await together(
                *(self._serve(work, t, share) for t, share in zip(teachers, shares, strict=True))
            )
        except _Lost as lost:
            self._record("sdpo_lost", "", f"step {batch.step + 1}: {lost}")
            await asyncio.gather(*(work.lose(rank, str(lost)) for rank in ranks))

    async def _serve(
        self, work: StepWork, teacher: SpawnedActor, requests: Sequence[Request]
    ) -> None:
        """Serve one teacher's share; its replacement continues if `sdpo.when_lost` is "wait"."""
        left = list(requests)

        async def serve(server: SpawnedActor) -> None:
            if server is not teacher:
                await work.bring_head(server)
            await work.run(server, left)

        await self._insist(teacher, serve)

    async def _insist(
        self, teacher: SpawnedActor, ask: Callable[[SpawnedActor], Coroutine[Any, Any, None]]
    ) -> None:
        """Query a teacher, again with its replacement if `sdpo.when_lost` is "wait"."""
        while True:
            try:
                return await while_alive(teacher, ask(teacher))
            except Exception as error:  # supervision boundary: judged by _end_of
                died = self._end_of(teacher, error)
                if died is None:
                    raise
                self._lose(teacher, died.reason)
                if self._config.sdpo.when_lost == "skip":
                    raise _Lost(str(died)) from None
                teacher = await self._successor(self._names.index(teacher.name))

    def _end_of(self, teacher: SpawnedActor, error: Exception) -> ActorDied | None:
        """Return a teacher's death that an error implies, or None for other errors.

        A deterministic error that it raised before is no fault of its process, and is not
        converted.
        """
        if isinstance(error, ActorDied):
            return error if error.actor == teacher.name else None
        raised = error.__cause__ if isinstance(error.__cause__, RemoteError) else error
        if getattr(raised, "actor", None) != teacher.name:
            return None
        place, key = self._names.index(teacher.name), error_key(error)
        before, self._errors[place] = self._errors.get(place), key
        if key == before and is_deterministic(error):
            return None
        return ActorDied(teacher.name, cause_of(error))

    def _lose(self, teacher: SpawnedActor, reason: str) -> None:
        self._host.lost(teacher, reason)
        self._replace(self._names.index(teacher.name), teacher)

    async def _successor(self, place: int) -> SpawnedActor:
        """Return the replacement of a lost teacher, or another teacher if there is none."""
        try:
            await self._replacing[place]
        except MeshError:
            if not self.alive():
                raise
        return self._teachers[place] or self.alive()[0]

    def alive(self) -> list[SpawnedActor]:
        """Return the teachers that can be queried, all of which are at the same version."""
        return [teacher for teacher in self._teachers if teacher is not None and teacher.alive]

    async def _spawn(self, name: str) -> SpawnedActor:
        number = self._names.index(name)
        placement = await wait_for_capacity(lambda: self._placement(number), self._host, name)
        return await spawn_on(self._host, placement, name, SDPOTeacherActor)

    async def _load(self, teacher: SpawnedActor) -> None:
        await teacher.call("load", self._config, self._folder, deadline_s=self._deadline_s)

    async def _pull(
        self, teacher: SpawnedActor, handle: WeightsHandle, source: SpawnedActor | None
    ) -> int | None:
        pulling = teacher.call("pull", handle, deadline_s=self._deadline_s)
        try:
            version: int = await (while_alive(source, pulling, TELL_S) if source else pulling)
        except Exception as error:  # supervision boundary: judged by _end_of
            died = self._end_of(teacher, error)
            if died is None:
                raise
            self._lose(teacher, died.reason)
            return None
        return version

    async def _forget(self, teacher: SpawnedActor) -> None:
        try:
            await teacher.call("forget", deadline_s=self._deadline_s)
        except ActorDied as died:
            self._host.lost(teacher, died.reason)
            self._replace(self._names.index(teacher.name), teacher)

    def _replace(self, place: int, dead: SpawnedActor) -> asyncio.Task[None]:
        """Start another process for a dead teacher, once."""
        if self._teachers[place] is dead:
            self._teachers[place] = None
            bringing = self._replacement(place, dead)
            self._replacing[place] = self._tasks.start(f"replacing {dead.name}", bringing)
        return self._replacing[place]

    async def _replacement(self, place: int, dead: SpawnedActor) -> None:
        died = dead.death.result() if dead.death else ActorDied(dead.name, "unknown")
        await self._host.stop(dead)
        try:
            await restart(self._budgets[place], died, partial(self._bring, place, dead.name))
        except GivenUp as end:
            self._record("actor_given_up", dead.name, str(end), **end.fields)
            raise ActorDied(dead.name, str(end)) from end.__cause__

    def _not_replaced(self, name: str, error: BaseException) -> None:
        if not isinstance(error, ActorDied):  # recorded as actor_given_up
            recorded_by(self._record)(name, error)

    async def _bring(self, place: int, name: str) -> None:
        """Start a teacher and bring it to the others' version before it serves."""
        teacher = await self._spawn(name)
        try:
            await self._load(teacher)
            await self._readable()
            async with self._syncing:
                detail = await self._catch_up(teacher)
                self._teachers[place] = teacher
        except BaseException:
            await self._host.stop(teacher)
            raise
        self.restarts += 1
        self._record("actor_restarted", teacher.name, f"process {teacher.pid}, {detail}")

    async def _readable(self) -> None:
        """Wait, at most the deadline, for a readable version: its trainer may be dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                while self._source is not None and not self._source.alive:
                    self._published.clear()
                    await self._published.wait()

    async def _catch_up(self, teacher: SpawnedActor) -> str:
        """Bring a replacement to the state of the other teachers; return a description."""
        if self._latest is None:
            return "at version 0"
        version = self._latest.version
        if self._config.sdpo.teacher != "ema":
            pulling = teacher.call("pull", self._latest, deadline_s=self._deadline_s)
            await (while_alive(self._source, pulling) if self._source else pulling)
            return f"at version {version}"
        others = self.alive()
        if others:
            await self._adopt_from(others[0], teacher)
            return f"at version {version}, its average taken from {others[0].name}"
        await teacher.call("adopt", [self._latest], deadline_s=self._deadline_s)
        return f"at version {version}, its average begins again there"

    async def _adopt_from(self, donor: SpawnedActor, teacher: SpawnedActor) -> None:
        """Copy one teacher's state to another, and always free the donor's copy."""
        try:
            state = await donor.call("state", deadline_s=self._deadline_s)
            await teacher.call("adopt", state, deadline_s=self._deadline_s)
        finally:
            with contextlib.suppress(ActorDied):  # its memory is freed with it
                await donor.call("release_state", deadline_s=self._deadline_s)
