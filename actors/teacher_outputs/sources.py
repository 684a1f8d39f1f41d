"""The trainer's sources of teacher outputs: a teacher in its process, or teachers of the mesh.

Both check that a teacher output has the trainer's version and covers the requested views. Services
decide which teacher computes what.

A buffer is between the event loop and the training thread: deliveries arrive on the loop and wait
while they are too far ahead; the thread takes them in order and blocks for missing ones.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from composer_mesh.actors.teacher_outputs.messages import (
    HeadHandle,
    StepOver,
    TeacherHead,
    TeacherOutput,
    TeacherOutputHandle,
    TeacherOutputsLost,
    ViewKey,
    WrongVersion,
    WrongViews,
    unpack,
    view_keys,
)
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.mesh.progress import PROGRESS, made_progress
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import RankPlan, split_views

Part: TypeAlias = "dict[str, Tensor]"

AHEAD = 2
"""Microbatches with views that may be buffered ahead of the trainer."""


class TeacherOutputBuffer:
    """The teacher outputs of one step of one trainer rank.

    `parts` lists the teachers that share each microbatch with views, in the order in which the
    training thread takes the microbatches.
    """

    def __init__(self, parts: dict[int, list[int]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._order = list(parts)
        self._moved = asyncio.Condition()
        self._taken = 0
        self._parts: dict[tuple[int, int], concurrent.futures.Future[Part]] = {
            (micro, part): concurrent.futures.Future()
            for micro, wanted in parts.items()
            for part in wanted
        }
        self._choices: dict[int, concurrent.futures.Future[Tensor]] = {
            micro: concurrent.futures.Future() for micro in parts
        }
        self._lost: str | None = None

    # --- on the event loop

    async def wait_for_capacity(self, micro: int) -> None:
        """Wait until a microbatch is close enough to the training thread's position to be buffered.

        Raises `TeacherOutputsLost` when the step no longer needs it.
        """
        place = self._order.index(micro)
        async with self._moved:
            await self._moved.wait_for(
                lambda: place < self._taken + AHEAD or self._lost is not None
            )
            if self._lost is not None:
                raise TeacherOutputsLost(self._lost)

    def deliver(self, micro: int, part: int, tensors: Part) -> None:
        """Store one teacher's part; the training thread may take it from now on."""
        with suppress(concurrent.futures.InvalidStateError):  # the step is lost already
            self._parts[micro, part].set_result(tensors)

    async def choice(self, micro: int) -> Tensor:
        """Return the student's top k ids [N, K]. Waits for the training thread's forward."""
        return await asyncio.shield(asyncio.wrap_future(self._choices[micro]))

    async def lose(self, reason: str) -> None:
        """Fail the rest of the step: all waiting callers get `TeacherOutputsLost`."""
        self._lost = reason
        futures: list[concurrent.futures.Future[Any]] = [*self._parts.values()]
        for future in [*futures, *self._choices.values()]:
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(TeacherOutputsLost(reason))
        async with self._moved:
            self._moved.notify_all()

    # --- on the training thread

    def offer_choice(self, micro: int, ids: Tensor) -> None:
        """Publish the top k ids that the student chose, for the teachers."""
        with suppress(concurrent.futures.InvalidStateError):  # the step is lost already
            self._choices[micro].set_result(ids)

    def take(self, micro: int) -> Part:
        """Return a microbatch's concatenated parts. Blocks for them.

        The deadlines of the controller's calls bound this: to the teachers, and to this process.
        """
        futures = [future for key, future in self._parts.items() if key[0] == micro]
        with PROGRESS.waiting("the SDPO teachers"):
            parts = [future.result() for future in futures]
        made_progress(f"the teacher output for microbatch {micro + 1}")
        asyncio.run_coroutine_threadsafe(self._advance(), self._loop)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    async def _advance(self) -> None:
        async with self._moved:
            self._taken += 1
            self._moved.notify_all()


FIRST_CAPACITY = 1 << 16
Figures = dict[str, float]


class InlineSource:
    """Runs the teacher's forward in the trainer when its output is needed; the reference source."""

    def __init__(
        self,
        teacher: TeacherModel,
        config: SdpoConfig,
        version: int,
        forwards: Sequence[int] | None = None,
    ) -> None:
        """`forwards`: forwards per microbatch that a sharded teacher runs on all ranks."""
        if teacher.version != version:
            raise WrongVersion(teacher.version, version)
        self._teacher, self._config, self._forwards = teacher, config, forwards
        self._took_s = 0.0

    def take(
        self, microbatch: int, views: Sequence[HintedView], choose: Callable[[], Tensor], /
    ) -> TeacherOutput:
        """Compute the teacher output now."""
        began = time.perf_counter()
        choice = choose() if asks_the_student(self._config) else None
        forwards = self._forwards[microbatch] if self._forwards else 0
        found = TeacherOutput(
            self._teacher.teacher_output(views, choice, forwards), self._teacher.head()
        )
        self._took_s += time.perf_counter() - began
        return found

    def skip(self, microbatch: int, /) -> None:
        """Run a sharded teacher together with the ranks whose microbatch has views."""
        if self._forwards:
            self._teacher.states([], self._forwards[microbatch])

    def figures(self) -> Figures:
        """Return the step's metrics: no bytes transferred, all compute time waited for."""
        return {
            "sdpo/bytes": 0,
            "sdpo/teacher_version": self._teacher.version,
            "time/sdpo_teacher_s": self._took_s,
            "time/sdpo_wait_s": self._took_s,
        }


class LostSource:
    """A source without teacher outputs, for when no teacher is alive."""

    def take(self, *_: object) -> TeacherOutput:
        """Raise `TeacherOutputsLost`."""
        raise TeacherOutputsLost("no SDPO teacher is alive")

    def skip(self, _microbatch: int, /) -> None:
        """Do nothing: there are no collectives."""

    def figures(self) -> Figures:
        return {"sdpo/bytes": 0}


class MeshSource:
    """Receives teacher outputs from teachers of the mesh, step by step.

    `begin` and the deliveries, which wait for `begin`, run on the event loop; `take` runs on the
    training thread.
    """

    def __init__(self, config: SdpoConfig, updates: int = 1) -> None:
        """`updates`: those of each step."""
        self._config, self._has_own_head = config, config.has_own_head(updates)
        self._begun = asyncio.Condition()
        self._step = -1
        self._head: tuple[int, TeacherHead] | None = None
        self._choice_buffers: dict[int, SendBuffer] = {}

    async def begin(self, batch: StepBatch, plan: RankPlan, teachers: int, version: int) -> None:
        """Expect the teacher outputs of a step from this many teachers."""
        self._views = {
            index: [batch.views[place] for place in microbatch.views]
            for index, microbatch in enumerate(plan.microbatches)
            if microbatch.views
        }
        self._splits = {index: split_views(v, teachers) for index, v in self._views.items()}
        parts = {
            index: [part for part, run in enumerate(split) if len(run)]
            for index, split in self._splits.items()
        }
        self._version, self._output_buffer = version, TeacherOutputBuffer(parts)
        self._heads: dict[int, TeacherHead | None] = {}
        self._bytes, self._read_s, self._teacher_s, self._wait_s = 0, 0.0, 0.0, 0.0
        async with self._begun:
            self._step = batch.step
            self._begun.notify_all()

    async def deliver(
        self, step: int, microbatch: int, part: int, handle: TeacherOutputHandle
    ) -> None:
        """Read one teacher's part of a microbatch. Waits for the step and for buffer capacity."""
        output_buffer = await self._output_buffer_of(step)
        self._check(microbatch, part, handle)
        await output_buffer.wait_for_capacity(microbatch)
        self._check_current(output_buffer, step)
        began = time.perf_counter()
        memory = await read(handle.buffer)
        self._check_current(output_buffer, step)
        self._pair_with_head(microbatch)
        self._read_s += time.perf_counter() - began
        self._bytes += handle.buffer.nbytes
        self._teacher_s += handle.compute_s
        output_buffer.deliver(microbatch, part, unpack(handle.layout, memory))

    async def take_head(self, handle: HeadHandle) -> None:
        """Read the teachers' own head, once per version."""
        tensors = unpack(handle.layout, await read(handle.buffer))
        self._head = (
            handle.version,
            TeacherHead(tensors["weight"], tensors.get("bias"), handle.softcap),
        )

    async def choice(self, step: int, microbatch: int, part: int) -> BufferHandle:
        """Return a handle to the student's top k ids of a part. Waits for the student."""
        output_buffer = await self._output_buffer_of(step)
        ids = await output_buffer.choice(microbatch)
        self._check_current(output_buffer, step)
        counts = [len(view.targets) for view in self._views[microbatch]]
        run = self._splits[microbatch][part]
        first, size = sum(counts[: run.start]), sum(counts[run.start : run.stop])
        buffer = self._choice_buffers.setdefault(part, SendBuffer(FIRST_CAPACITY))
        return await buffer.write(ids[first : first + size].contiguous())

    async def lose(self, step: int, reason: str) -> None:
        """Report that the teachers cannot deliver the rest of a step."""
        output_buffer = await self._output_buffer_of(step)
        await output_buffer.lose(reason)

    def take(
        self, microbatch: int, _views: Sequence[HintedView], choose: Callable[[], Tensor], /
    ) -> TeacherOutput:
        """Return a microbatch's teacher output; blocks, and is called by the training thread."""
        if asks_the_student(self._config):
            self._output_buffer.offer_choice(microbatch, choose().cpu())
        began = time.perf_counter()
        tensors = self._output_buffer.take(microbatch)
        self._wait_s += time.perf_counter() - began
        return TeacherOutput(tensors, self._heads[microbatch])

    def skip(self, _microbatch: int, /) -> None:
        """Do nothing: there are no collectives."""

    def figures(self) -> Figures:
        """Return the metrics of the step's teacher outputs."""
        tokens = sum(len(view.targets) for views in self._views.values() for view in views)
        return {
            "sdpo/bytes": self._bytes,
            "sdpo/teacher_version": self._version,
            "sdpo/bytes_per_token": self._bytes / max(1, tokens),
            "time/sdpo_bytes_per_s": self._bytes / self._read_s if self._read_s else 0.0,
            "time/sdpo_read_s": self._read_s,
            "time/sdpo_teacher_s": self._teacher_s,
            "time/sdpo_wait_s": self._wait_s,
        }

    async def _output_buffer_of(self, step: int) -> TeacherOutputBuffer:
        """Return a step's buffer. Waits for its start; raises `StepOver` for an earlier step."""
        async with self._begun:
            await self._begun.wait_for(lambda: self._step >= step)
            if self._step > step:
                raise StepOver(step + 1)
            return self._output_buffer

    def _check_current(self, output_buffer: TeacherOutputBuffer, step: int) -> None:
        """Raise `StepOver` if the next step began during a wait."""
        if output_buffer is not self._output_buffer:
            raise StepOver(step + 1)

    def _pair_with_head(self, microbatch: int) -> None:
        """Record the head present when states arrive: a replaced teacher may bring another one."""
        head = self._current_head()
        other = self._heads.setdefault(microbatch, head)
        if head is not None and other is not None and not _same(head, other):
            raise RuntimeError(
                f"the teachers of microbatch {microbatch} have different averages, because all of "
                "them were replaced: set sdpo.when_lost to 'skip'"
            )

    def _check(self, microbatch: int, part: int, handle: TeacherOutputHandle) -> None:
        if handle.version != self._version:
            raise WrongVersion(handle.version, self._version)
        run = self._splits[microbatch][part]
        wanted = view_keys(self._views[microbatch][run.start : run.stop])
        if handle.views != wanted:
            place = f"microbatch {microbatch}, teacher {part}"
            raise WrongViews(place, _shown(wanted), _shown(handle.views))

    def _current_head(self) -> TeacherHead | None:
        """Return the teachers' head, None where it is the trainer's own."""
        if not self._has_own_head:
            return None
        version = self._head[0] if self._head else -1
        if self._head is None or (self._config.follows_trainer and version != self._version):
            raise WrongVersion(version, self._version)
        return self._head[1]


def asks_the_student(config: SdpoConfig) -> bool:
    """Return whether teacher outputs depend on ids that the student chooses after its forward."""
    return config.teacher_output == "topk" and config.top_k_choice == "student"


def _same(one: TeacherHead, two: TeacherHead) -> bool:
    return one is two or torch.equal(one.weight, two.weight)


def _shown(keys: Sequence[ViewKey]) -> str:
    return ", ".join(f"{trace}:{turn}" for trace, turn in keys) or "no views"
