"""Refines pairs before training: quality filters, then reference log-probs, once per pair.

Stateful, because duplicates are found across calls: pairs must come in the order of their groups.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.services.steps.ports import Reference

TOO_LONG = "too_long"
"""Name of the built-in filter for pairs that exceed the policy's context."""

Encode = Callable[[Sequence[PreferencePair]], list[PairSample]]


@dataclass
class Refined:
    """Pairs that are fit for training, and how many each filter dropped."""

    pairs: list[PreferencePair]
    dropped: Counter[str]


class Refining:
    """Filters and scores pairs; `reference` is None where the loss needs none.

    `encode` tokenizes pairs and leaves out those that are too long.
    """

    def __init__(self, filters: PairFilters, encode: Encode, reference: Reference | None) -> None:
        self._filters, self._encode, self._reference = filters, encode, reference

    def remember(self, candidates: Sequence[PreferencePair]) -> None:
        """Replay to the filters the pairs that an earlier process passed to them, in the same
        order."""
        self._filters.keep(candidates)

    async def refine(self, pairs: Sequence[PreferencePair]) -> Refined:
        """Filter and score pairs. Waits for the reference. Calls must not overlap: filters are
        stateful."""
        # In a thread: near-duplicate detection is CPU-bound, and the event loop serves every
        # rollout.
        filtered = await asyncio.to_thread(self._filters.keep, pairs)
        dropped = Counter(filtered.dropped)
        samples = self._encode(filtered.kept)
        fitting = {sample.pair_id for sample in samples}
        kept = [pair for pair in filtered.kept if pair.pair_id in fitting]
        if too_long := len(filtered.kept) - len(kept):
            dropped[TOO_LONG] = too_long
        if self._reference is None or not kept:
            return Refined(kept, dropped)
        scores = await self._reference.score(samples)
        scored = zip(kept, scores, strict=True)
        return Refined([replace(pair, reference=score) for pair, score in scored], dropped)
