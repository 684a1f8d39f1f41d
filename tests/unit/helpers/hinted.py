"""Views, samples and batches of a step by their lengths alone, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, PolicySample, StepBatch


def view(
    trace: str, turn: int = 0, context: int = 3, response: int = 2, hint: int = 1
) -> HintedView:
    """A view whose ids say little and whose lengths are as told."""
    rows = list(range(context - 1, context - 1 + response))
    return HintedView(
        trace_id=trace,
        turn=turn,
        teacher_ids=[7] * (context + hint + response),
        student_rows=rows,
        teacher_rows=[row + hint for row in rows],
        targets=[20 + turn + place for place in range(response)],
    )


def sample(trace: str, length: int = 10) -> PolicySample:
    """A sample all of whose ids but the first are actions."""
    mask = [place > 0 for place in range(length)]
    return PolicySample(trace, [5] * length, mask, [0.0] * length, 1.0, [0] * length)


def batch(
    lengths: Sequence[int],
    views: Sequence[HintedView] = (),
    pairs: Sequence[int] = (),
    step: int = 0,
) -> StepBatch:
    """Samples t0, t1, ... of these lengths, and pairs whose longer answer has these lengths."""
    return StepBatch(
        step,
        [sample(f"t{place}", length) for place, length in enumerate(lengths)],
        list(views),
        [PairSample(f"p{place}", [1], [2], [3] * size) for place, size in enumerate(pairs)],
    )
