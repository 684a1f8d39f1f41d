"""Decode steps of the embedded engine: one token for each running row, as a replayable graph.

    inputs --one copy--> decode_step over static tensors --one copy--> ids and log-probs

`decode_step` has no value of a tensor in its control flow, allocates nothing that outlives it but
its result, and reads and writes the cache in place. On a CPU it is called with the shapes at hand.
On a GPU its kernels are captured once for each bucket of shapes and replayed, so that Python
launches no layer. Rows that fill a bucket write to a row of the cache that no request has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded_forward import ForwardLayout, PackedForward
from composer_mesh.actors.engines.embedded_requests import (
    RunningRequest,
    SamplingKind,
    SamplingRows,
    on_host,
    sampled,
)
from composer_mesh.actors.engines.kv_cache import Ids, RowCache
from composer_mesh.configs.worded import Worded

logger = logging.getLogger(__name__)

Inputs = np.ndarray[Any, np.dtype[np.float64]]
FIELDS = 8
"""Rows of a step's inputs: id, position, row of the cache to write to, and those of `SamplingRows`.

All are float64, which is exact for ids and positions, so that one copy brings them.
"""
FILLER = np.array([0, 0, 0, 0, 1, 1, 0, 0], dtype=np.float64)[:, None]
"""Inputs of a row that fills a bucket, but for the row that it writes to."""
SMALLEST_SPAN = 64


class StepNotCaptured(Worded, RuntimeError):
    """A model whose decode step waits for values on the host: its class, and the reason."""

    message = (
        "a decode step of {0} cannot be captured as a CUDA graph ({1}): "
        "set generator.cuda_graphs = false"
    )


Step = Callable[[], Tensor]
"""Computes a step over static tensors, or replays one; its result is overwritten by the next."""
Capture = Callable[[Step], Step]
"""Returns what replays a step."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a decode step is compiled for: its rows, the length of cache it reads, its sampling."""

    rows: int
    span: int
    ragged: bool
    """Whether rows have different lengths, so that attention needs a mask."""
    sampling: SamplingKind


def decode_step(
    forward: PackedForward, cache: RowCache, shape: StepShape, inputs: Tensor
) -> Tensor:
    """Return sampled ids and their log-probs, float64 `[2, rows]`, of inputs `[FIELDS, rows]`.

    Stores each row's key and value at its position. A function of tensors alone.
    """
    ids, positions, targets = inputs[:3].long()
    cache.aim(torch.stack([targets, positions]))
    layout = ForwardLayout(cache, shape.rows, [], positions, shape.span, shape.ragged)
    return sampled(forward(layout, ids, None), SamplingRows(inputs[3:], shape.sampling))


class DecodeSteps:
    """Runs decode steps of up to `rows` rows; with `capture` each bucket of shapes once.

    Buckets are powers of two of rows and of the cache's length. Captured steps read the weights and
    the cache where they lie: `check_addresses` drops them where something was allocated anew. A
    captured engine's cache has one more row, the last, for rows that fill a bucket.
    """

    def __init__(
        self,
        model: Any,
        forward: PackedForward,
        cache: RowCache,
        rows: int,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._forward, self._cache, self._rows = model, forward, cache, rows
        self._capture = capture
        self._graphs: dict[StepShape, Step] = {}
        self._captured_at: tuple[int, ...] = ()
        self._captured_cache: tuple[Tensor, ...] = ()
        pinned = forward.device.type == "cuda"
        self._staged = torch.zeros(FIELDS, rows, dtype=torch.float64, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._staged, device=forward.device)
        if capture is not None:
            self._prove(capture)

    @property
    def captures(self) -> bool:
        """Whether steps are replayed."""
        return self._capture is not None

    def __call__(
        self, running: Sequence[RunningRequest], ids: Ids, known: Ids
    ) -> tuple[list[int], list[float]]:
        """Return the next id and its log-prob of each row, whose newest ids and lengths these are.

        Waits for them.
        """
        rows = len(running)
        inputs = np.empty((FIELDS, rows))
        inputs[0], inputs[1], inputs[2] = ids, known - 1, np.arange(rows)
        inputs[3:] = np.array([one.sampling for one in running]).T
        kind = SamplingKind.of(running)
        longest = int(known.max())
        if self._capture is None:
            shape = StepShape(rows, longest, int(known.min()) < longest, kind)
            there = torch.from_numpy(inputs).to(self._forward.device)
            return on_host(decode_step(self._forward, self._cache, shape, there))
        return self._replay(self._capture, inputs, longest, kind)

    def check_addresses(self) -> None:
        """Drop captured steps if weights or the cache lie elsewhere than when they were captured.

        Values that were changed in place keep them.
        """
        if self._graphs and self._addresses() != self._captured_at:
            logger.info("weights or cache were allocated anew: captured decode steps are dropped")
            self.drop()

    def drop(self) -> None:
        """Free captured steps and the cache that they hold; later ones are captured again."""
        self._graphs.clear()
        self._captured_cache = ()

    @torch.inference_mode()
    def _prove(self, capture: Capture) -> None:
        """Capture the smallest step, which writes to the row that no request has."""
        try:
            filler = FILLER.copy()
            filler[2] = self._rows
            self._replay(capture, filler, 1, SamplingKind(False, False, False))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._model).__name__
            raise StepNotCaptured(name, f"{type(error).__name__}: {error}") from error

    def _replay(
        self, capture: Capture, inputs: Inputs, longest: int, kind: SamplingKind
    ) -> tuple[list[int], list[float]]:
        count = inputs.shape[1]
        rows = min(_bucket(count, 1), self._rows)
        span = min(_bucket(longest, SMALLEST_SPAN), self._cache.length)
        shape = StepShape(rows, span, True, kind)
        staged = self._staged.numpy()
        staged[:, :count], staged[:, count:] = inputs, FILLER
        staged[2, count:] = self._rows
        self._inputs.copy_(self._staged, non_blocking=True)
        if self._cache.tensors is not self._captured_cache:
            self.check_addresses()
        replay = self._graphs.get(shape)
        if replay is None:
            static = self._inputs[:, :rows]
            replay = capture(lambda: decode_step(self._forward, self._cache, shape, static))
            if not self._graphs:
                self._captured_at, self._captured_cache = self._addresses(), self._cache.tensors
            self._graphs[shape] = replay
        tokens, logprobs = on_host(replay())
        return tokens[:count], logprobs[:count]

    def _addresses(self) -> tuple[int, ...]:
        tensors = (*self._model.parameters(), *self._model.buffers(), *self._cache.tensors)
        return tuple(one.data_ptr() for one in tensors)


def _bucket(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


class CudaGraphs:
    """Captures steps as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Run a step outside of a graph, which initializes libraries, then capture it.

        Raises RuntimeError for a step that waits for the device.
        """
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            step()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process receive weights meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
