"""Actors of `sdpo_transport.py`: a sender and a reader of teacher outputs.

Teacher outputs are real tensors of the configured sizes, made once from random states. Measures
nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.sdpo_teacher import FIRST_CAPACITY
from composer_mesh.actors.teacher_outputs.messages import (
    TeacherHead,
    TensorLayout,
    make_teacher_output,
    pack,
    unpack,
)
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read


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
    return make_teacher_output(config, states, TeacherHead(weight, None), targets)


class SignalSender(MeshActor):
    """Holds one packed teacher output and sends it either way."""

    kind: ClassVar[str] = "signal_sender"

    @concurrent_endpoint
    async def load(self, config: SdpoConfig, shape: Shape) -> tuple[TensorLayout, ...]:
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
    async def fetch(self, layout: tuple[TensorLayout, ...], handle: BufferHandle) -> None:
        """Read a teacher output one-sidedly, as the trainer does."""
        unpack(layout, await read(handle))

    @concurrent_endpoint
    async def accept(self, layout: tuple[TensorLayout, ...], packed: Tensor) -> None:
        """Accept a teacher output that was sent inside the call."""
        unpack(layout, packed)
