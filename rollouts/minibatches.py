"""Division of a step's batch into the batches of its optimizer updates."""

from collections.abc import Sequence
from dataclasses import replace

from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts.batches import Skipped, StepBatch
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, plan_step


def minibatches(batch: StepBatch, updates: int, epochs: int = 1) -> list[StepBatch]:
    """Divide a batch into at most `updates` parts of about equal samples, repeated each epoch.

    A group is in one part, its samples in their order, and with them their views. Pairs are divided
    evenly, in their order. What was skipped counts in the first part.
    """
    ends = _group_ends(batch)
    count = max(1, min(updates, len(ends)))
    if count == 1:
        return [batch] * epochs
    samples = [0, *_cuts(ends, count)]
    pairs = [len(batch.pairs) * part // count for part in range(count + 1)]
    parts = []
    for number in range(count):
        own = batch.samples[samples[number] : samples[number + 1]]
        names = {sample.trace_id for sample in own}
        parts.append(
            replace(
                batch,
                samples=own,
                views=[view for view in batch.views if view.trace_id in names],
                pairs=batch.pairs[pairs[number] : pairs[number + 1]],
                skipped=Skipped() if number else batch.skipped,
            )
        )
    return parts * epochs


def plan_views(
    batch: StepBatch,
    parts: Sequence[StepBatch],
    budget: int,
    ranks: int,
    packed: bool,
    sharing: Sharing,
) -> list[RankPlan]:
    """Return the views of each rank's microbatches, numbered through all parts of a batch.

    The views are indices of the whole batch. A part has as many microbatches on every rank; those
    that a rank lacks are empty.
    """
    found: list[list[Microbatch]] = [[] for _ in range(ranks)]
    for part in parts:
        places = _places(batch, part)
        plans = plan_step(part, budget, ranks, packed, sharing)
        most = max(len(plan.microbatches) for plan in plans)
        for rank, plan in enumerate(plans):
            views = [[places[view] for view in one.views] for one in plan.microbatches]
            views += [[]] * (most - len(views))
            found[rank] += [Microbatch([], own) for own in views]
    return [RankPlan(microbatches, []) for microbatches in found]


def _group_ends(batch: StepBatch) -> list[int]:
    """Return where each run of samples of one group ends."""
    groups = [sample.group_id for sample in batch.samples]
    return [
        place + 1
        for place, group in enumerate(groups)
        if place + 1 == len(groups) or groups[place + 1] != group
    ]


def _cuts(ends: Sequence[int], count: int) -> list[int]:
    """Return the ends of `count` runs of groups, each with about as many samples, none empty."""
    cuts, last = [], -1
    for part in range(1, count):
        wanted = ends[-1] * part / count
        places = range(last + 1, len(ends) - (count - part))
        last = min(places, key=lambda place: (abs(ends[place] - wanted), place))
        cuts.append(ends[last])
    return [*cuts, ends[-1]]


def _places(batch: StepBatch, part: StepBatch) -> list[int]:
    """Return the index in the batch of each view of a part."""
    names = {sample.trace_id for sample in part.samples}
    return [place for place, view in enumerate(batch.views) if view.trace_id in names]
