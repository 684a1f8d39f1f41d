"""What the ranks of a TRL run tell each other: counts, figures, rollouts and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.traces import Trace

Figures = dict[str, float]
Ask = Callable[[Sequence[Trace]], tuple[list[PairSample], Figures]]


class PairsFailed(RuntimeError):
    """The main process could not get pairs, so no rank can go on."""


class Gathered:
    """Figures of one generation batch, and the calls that all ranks make together."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self._own = accelerator, dict[str, float]()
        self._everywhere = dict[str, float]()

    def add(self, name: str, value: float) -> None:
        """Note this rank's part of a sum; all ranks note the same names."""
        self._own[name] = self._own.get(name, 0.0) + value

    def sums(self) -> Figures:
        """Return the noted figures, summed over ranks."""
        return {**self.summed(self._own), **self._everywhere}

    def summed(self, figures: Mapping[str, float]) -> Figures:
        """Sum figures over ranks, in rank order; a name may be missing on some of them."""
        if self._accelerator.num_processes == 1:
            return dict(figures)
        found: Figures = {}
        for part in self._objects(dict(figures)):
            for name, value in part.items():
                found[name] = found.get(name, 0.0) + value
        return found

    def counts(self, own: Sequence[int]) -> list[list[int]]:
        """Return `counts[place][rank]` from each rank's counts by place."""
        device = self._accelerator.device
        every = self._accelerator.gather(torch.tensor([own], device=device))
        return [list(column) for column in zip(*every.tolist(), strict=True)]

    def pairs(self, ask: Ask, traces: Sequence[Trace]) -> list[PairSample]:
        """Return the pairs that the main process gets for the rollouts of all ranks.

        Raises `PairsFailed` on every rank if it gets none for an error.
        """
        if self._accelerator.num_processes == 1:
            pairs, self._everywhere = ask(traces)
            return pairs
        every = self._objects(list(traces))
        answer: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                answer = [ask([trace for part in every for trace in part])]
            except Exception as error:  # noqa: BLE001  the other ranks wait for an answer
                answer = [f"{type(error).__name__}: {error}"]
        torch.distributed.broadcast_object_list(answer, 0)
        if isinstance(answer[0], str):
            raise PairsFailed(answer[0])
        pairs, self._everywhere = answer[0]
        return pairs

    def _objects(self, own: Any) -> list[Any]:
        every: list[Any] = [None] * self._accelerator.num_processes
        torch.distributed.all_gather_object(every, own)
        return every
