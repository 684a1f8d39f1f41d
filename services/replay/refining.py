"""Between a decision and training: quality filters, then the reference's log-probs, once a pair.

Stateful, because duplicates are found across calls: pairs come in the order of their groups.
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
"""The filter that nobody configures: pairs that the policy's context cannot hold."""

Encode = Callable[[Sequence[PreferencePair]], list[PairSample]]


@dataclass
class Refined:
    """The pairs that are fit for training, and how many each filter dropped."""

    pairs: list[PreferencePair]
    dropped: Counter[str]


class Refining:
    """Filters and scores pairs; `reference` is None where the loss has none.

    `encode` makes ids of pairs and leaves out those that are too long.
    """

    def __init__(self, filters: PairFilters, encode: Encode, reference: Reference | None) -> None:
        self._filters, self._encode, self._reference = filters, encode, reference

    def remember(self, candidates: Sequence[PreferencePair]) -> None:
        """Let the filters know pairs that an earlier process gave them, in the same order."""
        self._filters.keep(candidates)

    async def refine(self, pairs: Sequence[PreferencePair]) -> Refined:
        """Waits for the reference. Calls must not overlap: filters remember in order."""
        # Near-duplicates take CPU time that the event loop, which serves every rollout, lacks.
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
