"""The SDPO teacher actor: the policy's outputs on hinted contexts, as distillation targets.

It runs forwards only. `rollouts.alignment` places the hints, `teaching` holds the teacher's
weights, and the trainer computes the loss.
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.checkpoints.teacher_average import (
    WholeTensors,
    read_average,
    write_average,
)
from composer_mesh.actors.models.device_memory import ASLEEP, DeviceMemory, DeviceTurn
from composer_mesh.actors.models.policy import converted, load_model
from composer_mesh.actors.models.sharding import distinct, own_weights, stored_weights
from composer_mesh.actors.teacher_outputs.messages import (
    HeadHandle,
    SlotPool,
    StepOver,
    TeacherOutputHandle,
    TensorLayout,
    pack,
    view_keys,
)
from composer_mesh.actors.teacher_outputs.teaching import (
    Blend,
    TeacherModel,
    load_teacher,
    teacher_vocabulary,
)
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.mesh.weights.choice import choose
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.rollouts.alignment import HintedView

FIRST_CAPACITY = 1 << 20
SLOTS = 2
"""Teacher outputs that may wait to be read: one is computed while the previous one transfers."""


class SDPOTeacherActor(MeshActor):
    """One process with the teacher's weights; several share the tokens of a step.

    Code that reads or copies the weights runs in a thread, one at a time.

    controller -- HintedView --> SDPOTeacherActor == teacher outputs by RDMA ==> trainer
    """

    kind: ClassVar[str] = "sdpo_teacher"

    def __init__(self) -> None:
        self._device = DeviceTurn()
        self._loaded: TeacherModel | None = None

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path, awake: bool = True) -> None:
        """Load the policy or the teacher model as version 0; register the output buffers.

        If it is not `awake`, the first `set_awake` loads, and all that is requested before waits.
        Raises `UnfitModelFolder` for a teacher model with another tokenizer.
        """
        self._folder, self._follows = folder, config.sdpo.follows_trainer
        self._kept: dict[str, Tensor] = {}
        self._make = partial(_teacher_of, config, folder)
        self._device, self._memory = DeviceTurn(awake), DeviceMemory(own_device())
        if awake:
            self._loaded = await in_thread(self._make)
        self._receiver = WeightReceiver()
        self._transport = choose(config.weights)
        self._publishers: list[WeightPublisher] = []
        self._slots = SlotPool(SLOTS, FIRST_CAPACITY)
        self._head_buffer = SendBuffer(FIRST_CAPACITY)
        self.policy_version = 0

    @property
    def _teacher(self) -> TeacherModel:
        assert self._loaded is not None  # what has the device's turn has it loaded
        return self._loaded

    @concurrent_endpoint
    async def set_awake(self, awake: bool) -> None:
        """Give the device up to others, or take it back; what is requested in between waits.

        A transfer that a pull still waits for is abandoned.
        """
        self._receiver.abandon()
        await self._device.set_awake(awake, self._take if awake else self._give)
        self.activity = "idle" if awake else ASLEEP

    def _take(self) -> None:
        self._memory.restore()
        self._loaded = self._loaded or self._make()

    def _give(self) -> None:
        if self._loaded is None:
            return
        self._loaded.release()
        models = [stored_weights(model).values() for model in self._loaded.models]
        held = [one for weights in models for one in weights]
        if self._follows:
            self._memory.release(held)
        else:
            self._memory.release((), constant=held)

    @concurrent_endpoint
    async def pull(self, handle: WeightsHandle) -> int:
        """Follow the trainer to a published version; return it. Waits for a running forward.

        A teacher whose weights are fixed reads none. A transfer that an earlier pull still waits
        for is abandoned: its publisher may be gone.
        """
        self._receiver.abandon()
        async with self._device:
            apply: Blend = _unread
            if self._follows:
                apply = (await self._receiver.receive(handle)).apply
            await in_thread(self._teacher.absorb, handle.version, apply)
            self.policy_version = handle.version
            return handle.version

    @concurrent_endpoint
    async def teacher_output(
        self, step: int, views: list[HintedView], choice: BufferHandle | None = None
    ) -> TeacherOutputHandle:
        """Return the configured output for each target of the views, in their order.

        `choice` refers to the student's top k ids, for outputs that need them. Waits for a free
        buffer: the handle is valid until `release`, or until a later step begins. Requests are
        served one at a time, in order.
        """
        ticket = await self._slots.acquire(step)
        try:
            async with self._device:
                self.activity = f"reading {len(views)} hinted contexts"
                chosen = None if choice is None else await read(choice)
                began = time.perf_counter()
                tensors = await asyncio.to_thread(self._teacher.teacher_output, views, chosen)
                took = time.perf_counter() - began
                layout, packed = await in_thread(pack, tensors)
                buffer = await self._slots.write(ticket, packed)
                self.activity = "idle"
                version = self._teacher.version
            if buffer is None:
                raise StepOver(step + 1)
            return TeacherOutputHandle(version, view_keys(views), ticket, layout, buffer, took)
        except BaseException:
            await self._slots.release(ticket)
            raise

    @concurrent_endpoint
    async def release(self, ticket: int) -> None:
        """Free the memory of a teacher output that was read."""
        await self._slots.release(ticket)

    @concurrent_endpoint
    async def forget(self) -> None:
        """Invalidate unread teacher outputs as the trainer restarts; any step may come next."""
        await self._slots.forget()

    @concurrent_endpoint
    async def keep(self) -> int:
        """Copy the moving average for `write`; return its version. Waits for a pull."""
        async with self._device:
            self._kept = await in_thread(self._copied_average)
            return self._teacher.version

    def _copied_average(self) -> dict[str, Tensor]:
        average = self._teacher.average()
        return {name: one.to("cpu", copy=True) for name, one in average.items()}

    @concurrent_endpoint
    async def write(self, draft: Path) -> list[WrittenFile]:
        """Write the copy into a checkpoint draft. Waits until it is on disk."""
        return await asyncio.to_thread(write_average, draft, self._kept)

    @concurrent_endpoint
    async def restore(self, version: int, file: Path | None) -> int:
        """Restore the average of a checkpoint, or else of the initial policy; return `version`.

        Raises `UnreadableCheckpoint`.
        """
        async with self._device:
            await in_thread(self._restore, version, file)
            self.policy_version = version
            return version

    def _restore(self, version: int, file: Path | None) -> None:
        self._teacher.restore(version, self._average_at(file))

    def _average_at(self, file: Path | None) -> WholeTensors:
        if file is not None:
            return read_average(file)
        return WholeTensors(distinct(own_weights(load_model(self._folder))))

    @concurrent_endpoint
    async def head(self) -> HeadHandle:
        """Return the head for this version's hidden states. Valid until the next version."""
        async with self._device:
            layout, packed = await in_thread(self._packed_head)
            buffer = await self._head_buffer.write(packed)
            return HeadHandle(self._teacher.version, layout, buffer, self._teacher.head().softcap)

    def _packed_head(self) -> tuple[tuple[TensorLayout, ...], Tensor]:
        head = self._teacher.head()
        tensors: dict[str, Tensor] = {"weight": head.weight}
        if head.bias is not None:
            tensors["bias"] = head.bias
        return pack(tensors)

    @concurrent_endpoint
    async def state(self) -> list[WeightsHandle]:
        """Return all the teacher's weights, for a replacement to adopt.

        Valid until `release_state`, which frees the copy and is called however the adoption ends.
        """
        async with self._device:
            version = self._teacher.version
            await self._close_publishers()
            self._publishers = [
                WeightPublisher(model.state_dict, transport=self._transport)
                for model in self._teacher.models
            ]
            return [await publisher.publish(version) for publisher in self._publishers]

    @concurrent_endpoint
    async def release_state(self) -> None:
        """Free the copy of the weights that `state` published."""
        async with self._device:
            await self._close_publishers()

    async def _close_publishers(self) -> None:
        while self._publishers:
            await self._publishers.pop().close()

    @concurrent_endpoint
    async def adopt(self, handles: list[WeightsHandle]) -> int:
        """Adopt another teacher's weights; return the version."""
        async with self._device:
            for model, handle in zip(self._teacher.models, handles, strict=True):
                staged = await self._receiver.receive(handle)
                await in_thread(staged.apply, model)
            self._teacher.version = self.policy_version = handles[0].version
            return handles[0].version


def _teacher_of(config: Config, folder: Path) -> TeacherModel:
    """The teacher that a run begins with, on this process's device."""
    dtype = getattr(torch, config.teacher_dtype)
    model = converted(load_teacher(config.sdpo, folder), dtype).to(own_device())
    rows = teacher_vocabulary(config.sdpo, folder)
    trainer = config.trainer
    return TeacherModel(
        model,
        config.sdpo,
        trainer.microbatch_tokens,
        vocabulary=rows,
        sharing="levels" if trainer.prefix_sharing else "off",
    )


def _unread(_model: object, _rate: float) -> None:
    raise AssertionError("a teacher with fixed weights takes none of the trainer's")
