"""Which sequences share a padded forward, so that little of it is padding.

Only lengths are known here; tensors and losses are the caller's.
"""

from collections.abc import Sequence


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped so that rows times longest row is at most `budget` tokens.

    Longest first; every index appears once. Raises ValueError for a sequence above the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        if lengths[index] > budget:
            raise ValueError(
                f"a sequence has {lengths[index]} tokens but a microbatch holds {budget}: raise "
                "trainer.microbatch_tokens or lower policy.max_context"
            )
        widest = lengths[groups[-1][0]] if groups else 0
        if groups and widest * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
