"""The calls that transfer the teacher outputs of one step to the trainer's ranks.

`teaching` chooses the teachers and handles their deaths.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from composer_mesh.actors.teacher_outputs.messages import TeacherOutputHandle
from composer_mesh.actors.teacher_outputs.sources import asks_the_student
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, split_views

ASKED = 2
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
        todo, asked = list(left), deque[asyncio.Task[TeacherOutputHandle]]()
        delivering: list[asyncio.Task[None]] = []
        try:
            for place, request in enumerate(todo):
                for following in todo[place + len(asked) : place + ASKED]:
                    asked.append(asyncio.create_task(self._teacher_output(teacher, following)))
                handle = await asked.popleft()
                await asyncio.gather(*delivering)
                delivering = [asyncio.create_task(self._deliver(teacher, request, handle, left))]
            await asyncio.gather(*delivering)
        finally:
            await cancel_and_wait([*asked, *delivering])

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
