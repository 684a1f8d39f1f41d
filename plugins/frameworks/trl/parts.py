"""Which error sites and pairs each microbatch of TRL trains, and what their losses are divided by.

TRL generates a batch of `steps_per_generation` microbatches for each rank, shuffles its rows, and
takes `gradient_accumulation_steps` of them for an optimizer step. SDPO tokens and pairs are divided
by their number in the optimizer step, over all of its microbatches and ranks, so that accumulation
and ranks change no loss. `Gathered` is what the ranks tell each other for that. Nothing here knows
TRL.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.traces import Trace

Rows = Sequence[Sequence[HintedView]]
"""The views of each row of a microbatch."""


@dataclass(frozen=True)
class ChannelPart:
    """What the two further channels train in one microbatch on one rank.

    `sdpo_tokens` and `pair_count` are the divisors of the optimizer step; with a sharded model,
    ranks without views or pairs take part in the forwards of those that have some.
    """

    rows: Rows
    pairs: Sequence[PairSample]
    sdpo_tokens: float
    pair_count: float
    any_rank_has_views: bool
    any_rank_has_pairs: bool


@dataclass(frozen=True)
class BatchLayout:
    """How TRL cuts a generation batch: microbatches in it, microbatches of an optimizer step."""

    microbatches: int
    accumulated: int
    ranks: int = 1

    @property
    def steps(self) -> int:
        """Optimizer steps of a generation batch; at least one, also if it is a part of a step."""
        return max(1, self.microbatches // self.accumulated)

    def step_of(self, microbatch: int) -> int:
        """Return which of them a microbatch belongs to."""
        return min(microbatch * self.steps // self.microbatches, self.steps - 1)

    def scale(self, step: int) -> Fraction:
        """Return by how much an optimizer step is larger than what this batch has of it."""
        own = sum(self.step_of(at) == step for at in range(self.microbatches))
        return Fraction(self.accumulated, own)

    def share(self, per_step: int) -> int:
        """Return how many of something a generation batch has, where a step has `per_step`."""
        return max(1, round(Fraction(per_step * self.microbatches, self.accumulated)))


def view_tokens(rows: Rows) -> int:
    """Return the number of hinted tokens of a microbatch."""
    return sum(len(view.targets) for views in rows for view in views)


def dealt(pairs: Sequence[PairSample], layout: BatchLayout) -> list[list[list[PairSample]]]:
    """Deal pairs to microbatches and ranks: `dealt[microbatch][rank]`.

    Steps get equally many, within one; then ranks, then the microbatches of a step.
    """
    found: list[list[list[PairSample]]] = [
        [[] for _ in range(layout.ranks)] for _ in range(layout.microbatches)
    ]
    own = [
        [at for at in range(layout.microbatches) if layout.step_of(at) == step]
        for step in range(layout.steps)
    ]
    for place, pair in enumerate(pairs):
        turn, step = divmod(place, layout.steps)
        among, rank = divmod(turn, layout.ranks)
        found[own[step][among % len(own[step])]][rank].append(pair)
    return found


def parts_of(
    rows: Sequence[Rows],
    tokens: Sequence[Sequence[int]],
    pairs: Sequence[PairSample],
    layout: BatchLayout,
    rank: int = 0,
) -> list[ChannelPart]:
    """Return the parts of this rank's microbatches.

    `rows` are its own views by microbatch, `tokens[microbatch][rank]` the hinted tokens of all
    ranks, and `pairs` those of the whole generation batch.
    """
    by_place, parts = dealt(pairs, layout), list[ChannelPart]()
    for at, own in enumerate(rows):
        step = layout.step_of(at)
        of_step = [one for one in range(layout.microbatches) if layout.step_of(one) == step]
        scale = layout.scale(step)
        parts.append(
            ChannelPart(
                rows=own,
                pairs=by_place[at][rank],
                sdpo_tokens=float(scale * sum(sum(tokens[one]) for one in of_step)),
                pair_count=float(scale * sum(len(p) for one in of_step for p in by_place[one])),
                any_rank_has_views=any(tokens[at]),
                any_rank_has_pairs=any(by_place[at]),
            )
        )
    return parts


Figures = dict[str, float]
Ask = Callable[[Sequence[Trace]], tuple[list[PairSample], Figures]]


class PairsFailed(RuntimeError):
    """The main process could not get pairs, so no rank can continue."""


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
