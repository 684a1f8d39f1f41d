"""The policy channel's samples: traces with their advantages."""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import Advantage, ChannelSample, PolicySample, Skipped
from composer_mesh.rollouts.traces import Trace


def policy_sample(trace: Trace, advantage: Advantage) -> PolicySample:
    """Convert a trace to a sample; ids that were not sampled get log-prob 0 and version -1.

    A list has the advantage of each turn, which all of its trained ids get.
    """
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trace.turns:
        trained = turn.trained
        logprobs += [0.0] * len(turn.context_ids)
        logprobs += turn.logprobs if trained else [0.0] * len(turn.action_ids)
        versions += [-1] * len(turn.context_ids)
        versions += turn.versions if trained else [-1] * len(turn.action_ids)
    return PolicySample(
        trace.trace_id,
        trace.token_ids(),
        trace.action_mask(),
        logprobs,
        _by_id(trace, advantage) if isinstance(advantage, list) else advantage,
        versions,
        trace.group_id,
        trace.expert_choices(),
    )


def _by_id(trace: Trace, advantages: Sequence[float]) -> list[float]:
    """Return the advantage of each id from those of the turns; 0 where none is trained."""
    runs = (
        chain(repeat(0.0, len(turn.context_ids)), repeat(own * turn.trained, len(turn.action_ids)))
        for turn, own in zip(trace.turns, advantages, strict=True)
    )
    return list(chain.from_iterable(runs))


def without_zero_advantages(
    samples: Sequence[PolicySample], others: Iterable[HintedView | ChannelSample]
) -> tuple[list[PolicySample], Skipped]:
    """Leave out the samples with advantage 0 that no other belongs to, and count them."""
    trained = {one.trace_id for one in others}
    skipped = [one for one in samples if one.is_zero and one.trace_id not in trained]
    kept = [one for one in samples if not one.is_zero or one.trace_id in trained]
    return kept, Skipped(len(skipped), sum(sum(sample.mask) for sample in skipped))
