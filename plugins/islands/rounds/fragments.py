"""Fragments of the weights, and the schedule of their rounds, as in Streaming DiLoCo (2501.18512).

steps       1 . . 4 . . . 8 . . . 12        4 steps a round in 2 fragments, overlap of 1:
fragment 0          b m       b m           `b`: its outer gradient is taken and sent
fragment 1      b m       b m               `m`: the round's result is merged
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fragment:
    """Some weights by name, in order, with their sizes."""

    index: int
    sizes: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class FragmentSchedule:
    """When a fragment's rounds begin and end, in trained steps."""

    steps_per_round: int
    offset: int
    overlap_steps: int
    steps: int
    """Steps of the run: its last step begins and ends a round of every fragment."""

    def begins(self, step: int) -> bool:
        """Whether an outer gradient is taken after this step."""
        return step == self.steps or (step > 0 and self._place(step) == 0)

    def merges(self, step: int) -> bool:
        """Whether a result is merged after this step; after `begins` where both are due."""
        late = step > self.overlap_steps and self._place(step - self.overlap_steps) == 0
        return step == self.steps or late

    def last_merge(self, step: int) -> int:
        """Return the last step up to `step` after which a result is merged; 0 for none."""
        while step > 0 and not self.merges(step):
            step -= 1
        return step

    def _place(self, step: int) -> int:
        return (step + self.offset) % self.steps_per_round


def cut(sizes: Mapping[str, int], count: int) -> list[Fragment]:
    """Cut weights into `count` fragments of successive ones, of about equal size.

    Raises ValueError for more fragments than weights.
    """
    if count > len(sizes):
        raise ValueError(
            f"islands.fragments is {count} but the model has {len(sizes)} trained weights: lower "
            f"it to {len(sizes)} or less"
        )
    parts: list[dict[str, int]] = [{}]
    left, names = sum(sizes.values()), list(sizes)
    for place, name in enumerate(names):
        open_parts = count - len(parts) + 1
        full = sum(parts[-1].values()) >= left / open_parts
        must = len(names) - place <= count - len(parts)
        if parts[-1] and len(parts) < count and (full or must):
            left -= sum(parts[-1].values())
            parts.append({})
        parts[-1][name] = sizes[name]
    return [Fragment(index, part) for index, part in enumerate(parts)]
