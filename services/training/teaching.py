"""The SDPO teachers of a run: sends them views, delivers their outputs, replaces them.

Each teacher computes its share of a step in the order in which the trainer needs it, two requests
ahead of the transfers, so that its forward overlaps training. Tensors move between the actors; only
calls are made here.

    teacher j   output 0   output 1   output 2  ...
    delivery               0 -> rank  1 -> rank ...
    trainer                           trains 0  ...

A teacher that dies, fails or is late is replaced, within the restart budget of its slot. The
running step is trained without the channel, or waits for the replacement, as `sdpo.when_lost` says;
a step that requires its teacher outputs always waits.
If a slot's budget is spent the others continue; without any teacher, the run ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor
from composer_mesh.actors.teacher_outputs.messages import TeacherOutputHandle
from composer_mesh.actors.teacher_outputs.sources import asks_the_student
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.failures import cause_of, error_key, is_deterministic, states_its_cause
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied, Recorder, RemoteError
from composer_mesh.mesh.waiting import cancel_and_wait, together
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, split_views
from composer_mesh.services.pool.membership import Membership
from composer_mesh.services.pool.process_placement import PlacementOf
from composer_mesh.services.pool.replicas import Call, Replica, ReplicaSpec, RestartRules, Router
from composer_mesh.services.training.turns import SET_AWAKE

QUEUED = 2
"""Requests queued at a teacher, so that it continues without waiting for the controller."""


@dataclass(frozen=True)
class Request:
    """One teacher's part of one microbatch of one share: that of a trainer rank, or a context."""

    share: int
    microbatch: int
    part: int
    views: list[HintedView]


class StepWork:
    """Transfers the teacher outputs of one step from teachers to ranks."""

    def __init__(
        self, config: Config, step: int, ranks: Sequence[SpawnedActor], deadline_s: float
    ) -> None:
        self._asks_student = asks_the_student(config.sdpo)
        self._has_own_head = config.sdpo.has_own_head(config.trainer.updates)
        self._step, self._ranks, self._deadline_s = step, ranks, deadline_s
        self._context = config.trainer.context_parallel

    async def bring_head(self, teacher: SpawnedActor) -> None:
        """Transfer the teachers' own output head to the ranks, if they have one."""
        if not self._has_own_head:
            return
        head = await teacher.call("head", deadline_s=self._deadline_s)
        await asyncio.gather(
            *(rank.call("take_head", head, deadline_s=self._deadline_s) for rank in self._ranks)
        )

    async def run(self, teacher: SpawnedActor, left: list[Request]) -> None:
        """Serve requests in order, removing each from `left` once it is delivered.

        Two requests are queued at the teacher, so that it computes while the output before is
        delivered.
        """
        todo, requested = list(left), deque[asyncio.Task[TeacherOutputHandle]]()
        delivering: list[asyncio.Task[None]] = []
        try:
            for place, request in enumerate(todo):
                for following in todo[place + len(requested) : place + QUEUED]:
                    requested.append(asyncio.create_task(self._teacher_output(teacher, following)))
                handle = await requested.popleft()
                await asyncio.gather(*delivering)
                delivering = [asyncio.create_task(self._deliver(teacher, request, handle, left))]
            await asyncio.gather(*delivering)
        finally:
            await cancel_and_wait([*requested, *delivering])

    async def lose(self, rank: SpawnedActor, reason: str) -> None:
        """Notify a rank that no more teacher outputs of this step will arrive."""
        await rank.call("lose_teacher_outputs", self._step, reason, deadline_s=self._deadline_s)

    def _ranks_of(self, request: Request) -> Sequence[SpawnedActor]:
        """Return the ranks that compute a share: of a context all get the same output."""
        first = request.share * self._context
        return self._ranks[first : first + self._context]

    async def _teacher_output(self, teacher: SpawnedActor, request: Request) -> TeacherOutputHandle:
        choice: Any = None
        if self._asks_student:
            choice = await self._ranks_of(request)[0].call(
                "student_choice",
                self._step,
                request.microbatch,
                request.part,
                deadline_s=self._deadline_s,
            )
        handle: TeacherOutputHandle = await teacher.call(
            "teacher_output", self._step, request.views, choice, deadline_s=self._deadline_s
        )
        return handle

    async def _deliver(
        self,
        teacher: SpawnedActor,
        request: Request,
        handle: TeacherOutputHandle,
        left: list[Request],
    ) -> None:
        try:
            await asyncio.gather(
                *(
                    rank.call(
                        "take_teacher_output",
                        self._step,
                        request.microbatch,
                        request.part,
                        handle,
                        deadline_s=self._deadline_s,
                    )
                    for rank in self._ranks_of(request)
                )
            )
            left.remove(request)
        finally:
            if teacher.alive:
                with suppress(ActorDied):
                    await teacher.call("release", handle.ticket, deadline_s=self._deadline_s)


def requests_for(
    teacher: int, batch: StepBatch, plans: Sequence[RankPlan], teachers: int
) -> list[Request]:
    """Return one teacher's share of a step, in the order in which the ranks need it.

    The order is by microbatch, as ranks of a sharded model wait for each other in each of them.
    Parts rotate, so that microbatches with fewer views than there are teachers leave no teacher
    idle.
    """
    found: list[tuple[int, Request]] = []
    for share, plan in enumerate(plans):
        wanted = [(i, m) for i, m in enumerate(plan.microbatches) if m.views]
        for turn, (index, microbatch) in enumerate(wanted):
            views = [batch.views[place] for place in microbatch.views]
            part = (teacher + turn + share) % teachers
            run = split_views(views, teachers)[part]
            if len(run):
                found.append((index, Request(share, index, part, views[run.start : run.stop])))
    return [request for _, request in sorted(found, key=lambda one: (one[0], one[1].share))]


NAME = "sdpo_teacher"


class _Lost(Exception):
    """The teacher outputs of a step are given up."""


class SdpoTeachers:
    """The SDPO teachers' processes, and the transfers from them to the trainer's ranks."""

    def __init__(
        self,
        config: Config,
        host: MeshHost,
        placement: PlacementOf,
        record: Recorder,
        actor_class: type[MeshActor] = SDPOTeacherActor,
        actor_args: tuple[Any, ...] = (),
        turn: asyncio.Event | None = None,
    ) -> None:
        """`turn` is set while teachers may have their devices; without it they keep them."""
        self._config, self._record, self._turn = config, record, turn
        self._deadline_s = config.run.deadline_s
        spec = ReplicaSpec(
            NAME,
            actor_class,
            host,
            actor_args,
            deadline_s=self._deadline_s,
            restart=RestartRules.of(config.supervision, config.run.seed),
            record=record,
            numbered=config.sdpo.replicas > 1,
            placement=placement,
            stable_names=True,
            catch_up=self._catch_up,
        )
        # Steps choose the teachers: nothing is routed or queued.
        self._members = Membership(spec, Router(max_outstanding=1, queue=0))
        self._errors: dict[str, str] = {}
        self._fixed_head_brought = False

    @property
    def restarts(self) -> int:
        """Number of teachers that have replaced dead ones."""
        return self._members.restarts

    async def start(self) -> None:
        """Start every teacher's process. Waits until all answer."""
        await self._members.grow(self._config.sdpo.replicas, self._deadline_s)

    async def load(self, folder: Path) -> None:
        """Load the initial policy in every teacher."""
        awake = self._turn is None
        await self._members.set_up(Call("load", (self._config, folder, awake)), self._deadline_s)

    async def set_awake(self, awake: bool) -> None:
        """Let every teacher have its device, or give it up. Waits for replacements to have it."""
        await self._members.set_up(Call(SET_AWAKE, (awake,)), self._deadline_s)
        if awake:
            await self._replaced()

    async def close(self) -> None:
        """Cancel running replacements and stop every teacher."""
        await self._members.close(0.0)

    async def pull(self, handle: WeightsHandle, source: SpawnedActor | None = None) -> list[int]:
        """Make every living teacher pull a version; return the versions they serve.

        `source` is the actor that published it: `ActorDied` is raised if it dies.
        """
        pull = Call("pull", (handle,), source=source)
        return await self._members.set_up(pull, self._deadline_s)

    async def forget(self) -> None:
        """Drop what was delivered or requested for ranks that have been replaced."""
        self._fixed_head_brought = False
        await asyncio.gather(*(self._forget(one) for one in self._members.members if one.serving))

    async def restore(self, version: int, average: Path | None) -> None:
        """Load the moving average of a version, None for the initial one, in every teacher.

        Waits for replacements; a teacher that fails is replaced, and all load it again, as a
        replacement may have copied the average of before. Raises the error of a failed replacement
        if no teacher is left.
        """
        while True:
            await self._replaced()
            if not (teachers := self.alive()):
                raise self._members.last_death()
            restores = (self._restored(teacher, version, average) for teacher in teachers)
            if all(await asyncio.gather(*restores)) and self.alive() == teachers:
                return

    async def ready(self, step: int, required: bool = False) -> list[SpawnedActor]:
        """Return the teachers for a step. Waits for replacements if `required` or configured.

        Raises the error of a failed replacement if no teacher is left.
        """
        if self._waits(required):
            await self._replaced()
        alive = self.alive()
        if not alive and not self._replacing():
            raise self._members.last_death()
        if not alive:
            self._record("sdpo_lost", "", f"step {step + 1}: no SDPO teacher is alive")
        return alive

    async def feed(
        self,
        batch: StepBatch,
        plans: Sequence[RankPlan],
        teachers: Sequence[SpawnedActor],
        ranks: Sequence[SpawnedActor],
        required: bool = False,
    ) -> None:
        """Deliver a step's teacher outputs to the ranks. Waits until all are read or given up.

        They are never given up if `required`.
        """
        count = len(teachers)
        shares = [requests_for(place, batch, plans, count) for place in range(count)]
        work = StepWork(self._config, batch.step, ranks, self._deadline_s)
        waits = self._waits(required)
        try:
            if not self._fixed_head_brought:
                await self._insist(teachers[0], work.bring_head, waits)
                self._fixed_head_brought = not self._config.sdpo.follows_trainer
            await together(
                *(
                    self._serve(work, teacher, share, waits)
                    for teacher, share in zip(teachers, shares, strict=True)
                )
            )
        except _Lost as lost:
            self._record("sdpo_lost", "", f"step {batch.step + 1}: {lost}")
            await asyncio.gather(*(work.lose(rank, str(lost)) for rank in ranks))

    def _replacing(self) -> list[asyncio.Task[None]]:
        """Return the running replacements of teachers."""
        tasks = map(self._members.replacement, range(self._config.sdpo.replicas))
        return [task for task in tasks if task is not None]

    async def _replaced(self) -> None:
        """Wait until no teacher is being replaced."""
        while replacing := self._replacing():
            await asyncio.wait(replacing)

    def _waits(self, required: bool) -> bool:
        """Whether a step waits for the replacement of a teacher that it loses."""
        return required or self._config.sdpo.when_lost == "wait"

    async def _serve(
        self, work: StepWork, teacher: SpawnedActor, requests: Sequence[Request], waits: bool
    ) -> None:
        """Serve one teacher's share; its replacement continues if the step waits for it."""
        left = list(requests)

        async def serve(server: SpawnedActor) -> None:
            if server is not teacher:
                await work.bring_head(server)
            await work.run(server, left)

        await self._insist(teacher, serve, waits)

    async def _insist(
        self,
        teacher: SpawnedActor,
        ask: Callable[[SpawnedActor], Coroutine[Any, Any, None]],
        waits: bool,
    ) -> None:
        """Query a teacher, again with its replacement if the step waits for it."""
        while True:
            try:
                return await while_alive(teacher, ask(teacher))
            except Exception as error:  # supervision boundary: judged by _end_of
                died = self._end_of(teacher, error)
                if died is None:
                    raise
                self._lose(teacher, died.reason)
                if not waits:
                    raise _Lost(str(died)) from None
                teacher = await self._successor(teacher)

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
        key, before = error_key(error), self._errors.get(teacher.name)
        self._errors[teacher.name] = key
        if states_its_cause(error) or (key == before and is_deterministic(error)):
            return None
        return ActorDied(teacher.name, cause_of(error))

    def _lose(self, teacher: SpawnedActor, reason: str) -> None:
        for replica in self._members.members:
            if replica.actor is teacher:
                self._members.lose(replica, reason)

    async def _successor(self, dead: SpawnedActor) -> SpawnedActor:
        """Return the replacement of a lost teacher, or another teacher if there is none."""
        slot = next(one.slot for one in self._members.members if one.name == dead.name)
        if (replacing := self._members.replacement(slot)) is not None:
            await asyncio.wait([replacing])
        alive = self.alive()
        if not alive:
            raise self._members.last_death()
        return next((one for one in alive if one.name == dead.name), alive[0])

    def alive(self) -> list[SpawnedActor]:
        """Return the teachers that can be queried, all of which are at the same version."""
        actors = [one.actor for one in self._members.members if one.serving]
        return [actor for actor in actors if actor is not None and actor.alive]

    def at_work(self) -> list[SpawnedActor]:
        """Return the teachers that a step may wait for: those alive, and those being loaded."""
        coming = [one.actor for one in self._members.coming]
        return [*self.alive(), *(actor for actor in coming if actor is not None)]

    async def _restored(self, teacher: SpawnedActor, version: int, average: Path | None) -> bool:
        try:
            await teacher.call("restore", version, average, deadline_s=self._deadline_s)
        except Exception as error:  # supervision boundary: judged by _end_of
            if (died := self._end_of(teacher, error)) is None:
                raise
            self._lose(teacher, died.reason)
            return False
        return True

    async def _forget(self, teacher: Replica) -> None:
        with suppress(ActorDied):  # it is replaced
            await self._call(teacher, Call("forget"))

    async def _call(self, teacher: Replica, call: Call) -> Any:
        return await self._members.dispatch.direct(teacher, call, self._deadline_s)

    async def _catch_up(self, teacher: Replica, calls: Sequence[Call]) -> str:
        """Bring a replacement to the state of the other teachers; return a description.

        A moving average is taken from another teacher, since a pull gives the student's weights.
        """
        if self._turn is not None and calls:
            await self._turn.wait()
            awake = Call(SET_AWAKE, (True,))
            await self._call(teacher, awake)
            for other in self.alive():
                await other.call(SET_AWAKE, True, deadline_s=self._deadline_s)
            calls = [call for call in calls if call.endpoint != SET_AWAKE]
        pulls = [call for call in calls if call.endpoint == "pull"]
        for call in calls:
            if call not in pulls or self._config.sdpo.teacher != "ema":
                await self._call(teacher, call)
        if not pulls:
            return "at version 0"
        (handle,) = pulls[0].args
        if self._config.sdpo.teacher != "ema":
            return f"at version {handle.version}"
        if others := self.alive():
            await self._adopt_from(others[0], teacher)
            return f"at version {handle.version}, its average taken from {others[0].name}"
        await self._call(teacher, Call("adopt", ([handle],)))
        return f"at version {handle.version}, its average restarts there"

    async def _adopt_from(self, donor: SpawnedActor, teacher: Replica) -> None:
        """Copy one teacher's state to another, and always free the donor's copy."""
        try:
            state = await donor.call("state", deadline_s=self._deadline_s)
            await self._call(teacher, Call("adopt", (state,)))
        finally:
            with suppress(ActorDied):  # its memory is freed with it
                await donor.call("release_state", deadline_s=self._deadline_s)
