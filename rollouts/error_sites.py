"""Which error sites are hinted first, and which right actions a hinted teacher is compared at."""

from collections.abc import Callable, Iterator, Sequence

from composer_mesh.configs.sdpo import RightAction, Sites
from composer_mesh.rollouts.hint_sources import rounds
from composer_mesh.rollouts.traces import Trace


def ordered_sites(
    traces: Sequence[Trace], turns: Callable[[Trace], list[int]], sites: Sites = "all"
) -> Iterator[tuple[Trace, int]]:
    """Iterate over the turns that may be hinted, in the order in which a step takes them.

    "all" is round-robin over the traces, "first" only each trace's earliest turn, and "surprise"
    begins with the highest mean surprisal of the sampled tokens, ties round-robin.
    """
    if sites == "first":
        return rounds(traces, lambda trace: sorted(turns(trace))[:1])
    every = rounds(traces, turns)
    if sites == "all":
        return every
    return iter(sorted(every, key=lambda site: -surprisal(*site)))


def surprisal(trace: Trace, turn: int) -> float:
    """Return the mean surprisal in nats of a turn's tokens when they were sampled; 0 for none."""
    logprobs = trace.turns[turn].logprobs
    return -sum(logprobs) / len(logprobs) if logprobs else 0.0


def right_sibling(
    failed: Trace, turn: int, group: Sequence[Trace], right: RightAction
) -> Trace | None:
    """Return a rollout of the same prompt that did the right thing where another one failed.

    It has read the same ids up to this turn, has no error there, and acted otherwise; with
    "success" it also succeeded. The highest reward wins, then the fewest turns, then the lowest
    sample number: the order of `group` does not matter.
    """
    own = failed.turns[turn].action_ids
    found = [
        one
        for one in group
        if one.trace_id != failed.trace_id
        and (one.group_id, one.role) == (failed.group_id, failed.role)
        and not one.screened
        and (one.success or right == "no_error")
        and turn < len(one.turns)
        and all(site.turn != turn for site in one.error_sites)
        and one.turns[turn].action_ids not in ([], own)
        and one.prompt_ids(turn) == failed.prompt_ids(turn)
    ]
    return min(found, key=lambda t: (-t.reward, len(t.turns), t.sample, t.trace_id), default=None)
