"""The SDPO teacher actor: the same weights, shown a hint, say how they would have answered.

It runs forwards only. Where hints go is `rollouts.alignment`; the loss is the trainer's.
"""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.language_model import LanguageModel
from composer_mesh.actors.policy import load_model
from composer_mesh.actors.signals import SignalHandle
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.transport import SendBuffer
from composer_mesh.mesh.weights import WeightReceiver, WeightsHandle
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.packing import microbatches

FIRST_CAPACITY = 1 << 20


class SDPOTeacherActor(MeshActor):
    """One process with a copy of the policy.

    controller -- HintedView --> SDPOTeacherActor == hidden states by RDMA ==> trainer
    """

    kind: ClassVar[str] = "sdpo_teacher"

    def __init__(self) -> None:
        self._order = asyncio.Lock()

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy as version 0 and register the buffer that signals leave by."""
        self._budget = config.trainer.microbatch_tokens
        self._model: Any = load_model(folder)
        self._receiver, self._buffer = WeightReceiver(), SendBuffer(FIRST_CAPACITY)
        self.policy_version = 0

    @concurrent_endpoint
    async def pull(self, handle: WeightsHandle) -> int:
        """Take a published version over; returns it. Waits for a signal under way."""
        async with self._order:
            staged = await self._receiver.receive(handle)
            staged.apply(self._model)
            self.policy_version = handle.version
            return handle.version

    @concurrent_endpoint
    async def signal(self, views: list[HintedView]) -> SignalHandle:
        """The teacher's hidden state for each target of the views, in their order.

        The handle is good until the next call: one step at a time reads it.
        """
        async with self._order:
            assert self.policy_version is not None
            self.activity = f"reading {len(views)} hinted contexts"
            states = await asyncio.to_thread(hinted_states, self._model, views, self._budget)
            buffer = await self._buffer.write(states)
            self.activity = "idle"
            return SignalHandle(self.policy_version, len(states), buffer)


@torch.no_grad()
def hinted_states(model: Any, views: list[HintedView], budget: int) -> Tensor:
    """Last hidden states [N, H], normed, at the teacher rows of each view, in the views' order."""
    language_model = LanguageModel(model)
    rows: list[Tensor] = [torch.empty(0)] * len(views)
    for indices in microbatches([len(view.teacher_ids) for view in views], budget):
        states = language_model.hidden([views[index].teacher_ids for index in indices])
        for row, index in enumerate(indices):
            rows[index] = states[row, views[index].teacher_rows]
    return torch.cat(rows)
