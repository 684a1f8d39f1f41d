"""Teacher outputs of hinted tokens: the messages and the tensors they describe.

A teacher output is a few tensors with a row for each target of its views. `sdpo_channel` computes
losses from them; `teaching` holds the teacher's weights.

Axes: N hinted response tokens, H hidden size of the teacher, V vocabulary, K entries of the top k.

A small pool of registered buffers for teacher outputs, never overwritten while read.

A ticket holds a buffer until it is released. A new step reclaims all buffers of earlier steps,
whose readers are gone by then. So does `forget`, after which any step may come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.configs.worded import Worded
from composer_mesh.losses.blocks import LinearHead, default_block
from composer_mesh.losses.fused import linear_logprobs
from composer_mesh.rollouts.alignment import HintedView

if TYPE_CHECKING:  # losses and steps also run where Monarch is not installed (`make gpu-day`),
    # and in processes from which others are forked
    from composer_mesh.mesh.transport import BufferHandle

ViewKey = tuple[str, int]

PADDING_SCORE = -200.0
"""Score of an id that a teacher's head lacks: finite, as losses multiply its log-prob by 0."""


class TeacherOutputsLost(Worded, RuntimeError):
    """The teachers cannot deliver the rest of a step's outputs."""

    message = "the step continues without its SDPO signals: {0}"


class WrongVersion(Worded, RuntimeError):
    """A teacher output was computed with another weight version than the trainer's."""

    message = (
        "the SDPO signal is of version {0} but the trainer is at {1}: let the teacher pull "
        "before it is queried"
    )


class WrongViews(Worded, RuntimeError):
    """A teacher output covers other tokens than the requested ones."""

    message = "the SDPO signal for {0} is about {2}, not {1}: plan both from one batch"


class StepOver(Worded, RuntimeError):
    """A teacher output was requested for a step that has ended: its number, from 1 on."""

    message = "step {0} is over: nobody needs its signal any more"


@dataclass(frozen=True)
class TeacherHead:
    """The linear head from a teacher's hidden states to logits; [V, H] and [V], and their cap."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None = None

    @classmethod
    def of(cls, model: LanguageModel) -> TeacherHead:
        """Return a model's own head."""
        return cls(model.weight, model.bias, model.softcap)

    def on(self, device: torch.device) -> TeacherHead:
        """Return a copy on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return TeacherHead(self.weight.to(device), bias, self.softcap)

    def fitted(self, vocabulary: int) -> TeacherHead:
        """Return the head with this many rows, as one tokenizer's models may be padded differently.

        Rows beyond are cut, so the ids below share all of the probability; missing rows are added
        with scores so low that their probability is 0 in float32.
        """
        missing = vocabulary - len(self.weight)
        if missing <= 0:
            bias = None if self.bias is None else self.bias[:vocabulary]
            return TeacherHead(self.weight[:vocabulary], bias, self.softcap)
        rows = self.weight.new_zeros(missing, self.weight.shape[1])
        bias = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        low = bias.new_full((missing,), PADDING_SCORE)
        return TeacherHead(torch.cat([self.weight, rows]), torch.cat([bias, low]), self.softcap)


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's tensors for some views, in their order, and the matching head.

    hidden    states [N, H]; head None is the trainer's own
    full      logits [N, V], float32
    topk      ids [N, K] and logprobs [N, K], normalized over the vocabulary, tempered
    sampled   logprobs [N] of the targets, tempered
    """

    tensors: dict[str, Tensor]
    head: TeacherHead | None = None

    def on(self, device: torch.device) -> TeacherOutput:
        """Return a copy on the student's device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return TeacherOutput(tensors, None if self.head is None else self.head.on(device))


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a teacher output within its flat byte buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TeacherOutputHandle:
    """Handle to a teacher output, readable until its ticket is released."""

    version: int
    views: tuple[ViewKey, ...]
    ticket: int
    layout: tuple[TensorLayout, ...]
    buffer: BufferHandle
    compute_s: float


@dataclass(frozen=True)
class HeadHandle:
    """Handle to a teacher's own head, encoded like a teacher output of one row."""

    version: int
    layout: tuple[TensorLayout, ...]
    buffer: BufferHandle
    softcap: float | None


def view_keys(views: Sequence[HintedView]) -> tuple[ViewKey, ...]:
    """Return the views' keys: their traces and turns."""
    return tuple((view.trace_id, view.turn) for view in views)


def make_teacher_output(
    config: SdpoConfig,
    states: Tensor,
    head: TeacherHead,
    targets: Tensor,
    choice: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the configured tensors from the teacher's states [N, H] and its head.

    `targets` [N] are the ids that the rows predict; `choice` [N, K] are the student's top k ids.
    """
    if config.teacher_output == "hidden":
        return {"states": states}
    if config.teacher_output == "sampled":
        found = linear_logprobs(
            states,
            head.weight,
            targets,
            bias=head.bias,
            softcap=head.softcap,
            temperature=config.temperature,
        )
        return {"logprobs": found}
    temperature = 1.0 if config.teacher_output == "full" else config.temperature
    scorer = LinearHead(head.weight, head.bias, temperature, torch.float32, head.softcap)
    blocks = (scores for _, scores in scorer.scores(states, default_block(states)))
    if config.teacher_output == "full":
        return {"logits": torch.cat([scores.clone() for scores in blocks])}
    return _top_k(blocks, min(config.top_k, len(head.weight)), choice)


def _top_k(blocks: Iterable[Tensor], top_k: int, choice: Tensor | None) -> dict[str, Tensor]:
    ids, logprobs, at = [], [], 0
    for scores in blocks:
        normal = scores.logsumexp(-1, keepdim=True)
        if choice is None:
            found = scores.topk(top_k, dim=-1).indices
        else:
            found = choice[at : at + len(scores)].to(scores.device).long()
        at += len(scores)
        ids.append(found.int())
        logprobs.append(scores.gather(-1, found) - normal)
    return {"ids": torch.cat(ids), "logprobs": torch.cat(logprobs)}


def pack(tensors: dict[str, Tensor]) -> tuple[tuple[TensorLayout, ...], Tensor]:
    """Pack tensors into one byte buffer, each aligned to 8 bytes; return layout and buffer."""
    layout = tuple(TensorLayout(name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    parts: list[Tensor] = []
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-flat.numel() % 8)]
    return layout, torch.cat(parts)


def unpack(layout: Sequence[TensorLayout], memory: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a byte buffer, as views of it."""
    found, at = {}, 0
    for entry in layout:
        size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        found[entry.name] = memory[at : at + size].view(entry.dtype).view(entry.shape)
        at += size + -size % 8
    return found


class SlotPool:
    """A fixed number of buffers, handed out by ticket; `acquire` waits while all are in use."""

    def __init__(self, count: int, capacity_bytes: int) -> None:
        from composer_mesh.mesh.transport import SendBuffer

        self._buffers = [SendBuffer(capacity_bytes) for _ in range(count)]
        self._held: dict[int, int] = {}
        self._step, self._tickets, self._era = -1, 0, 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Number of buffers in use."""
        return len(self._held)

    async def acquire(self, step: int) -> int:
        """Return a ticket for a free buffer; waits. Raises `StepOver` once a later step began."""
        async with self._freed:
            era = self._era
            if step > self._step:
                self._step, self._held = step, {}
                self._freed.notify_all()

            def over() -> bool:
                return step < self._step or era != self._era

            await self._freed.wait_for(lambda: over() or len(self._held) < len(self._buffers))
            if over():
                raise StepOver(step + 1)
            slot = min(set(range(len(self._buffers))) - set(self._held.values()))
            self._tickets += 1
            self._held[self._tickets] = slot
            return self._tickets

    async def write(self, ticket: int, data: Tensor) -> BufferHandle | None:
        """Write data into the ticket's buffer; return None for a ticket of an ended step."""
        slot = self._held.get(ticket)
        return None if slot is None else await self._buffers[slot].write(data)

    async def forget(self) -> None:
        """Reclaim all buffers, also from waiting callers; there must be no readers left."""
        async with self._freed:
            self._step, self._held, self._era = -1, {}, self._era + 1
            self._freed.notify_all()

    async def release(self, ticket: int) -> None:
        """Release a buffer; does nothing for a ticket of an ended step."""
        async with self._freed:
            self._held.pop(ticket, None)
            self._freed.notify_all()
