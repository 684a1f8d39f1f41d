"""Division of a step: samples over trainer ranks and microbatches, views over teachers.

A pure function of lengths, so that the trainer, its teachers and the controller compute the same
plan without communication.

Division of a step's batch into the batches of its optimizer updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest

from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, Skipped, StepBatch
from composer_mesh.rollouts.packing import (
    SharedPart,
    balanced_parts,
    check_fits,
    microbatches,
    parts_of,
    shared_microbatches,
    spread,
)
from composer_mesh.rollouts.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Batch indices of the samples that share a forward, of their views and of pairs, in order.

    Pairs are in it only where prefixes are shared; `forwards` of the model compute it.
    """

    samples: list[int]
    views: list[int]
    pairs: list[int] = field(default_factory=list)
    forwards: int = 1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Work of one trainer rank in a step, in order: its microbatches, and the pairs after them.

    `large_pairs` do not fit the budget with both sides at once, and are computed side by side.
    """

    microbatches: list[Microbatch]
    pairs: list[int]
    large_pairs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForwardCounts:
    """Number of forwards that all ranks of a sharded model run in a step: that of the busiest rank.

    `trained` counts those of each microbatch; each of the `large_pairs` takes two without and two
    with gradients.
    """

    trained: list[int]
    pairs: int
    large_pairs: int

    @property
    def microbatches(self) -> int:
        return len(self.trained)


def plan_step(
    batch: StepBatch,
    budget: int,
    ranks: int = 1,
    packed: bool = False,
    sharing: Sharing = "off",
) -> list[RankPlan]:
    """Divide a step over ranks by tokens, and each rank's share into microbatches of `budget`.

    A rank may get nothing. Microbatches without views come first, so that they run while the
    teacher computes. With `packed` samples share rows, and the budget applies to the packed rows.
    With `sharing` samples and pairs that begin alike are in one microbatch, and what they share
    counts once.
    """
    owners = {sample.trace_id: place for place, sample in enumerate(batch.samples)}
    by_sample: dict[int, list[int]] = {}
    for place, view in enumerate(batch.views):
        if view.trace_id not in owners:
            raise ValueError(
                f"a view of trace {view.trace_id!r} has no sample: batch both together"
            )
        by_sample.setdefault(owners[view.trace_id], []).append(place)
    lengths = [len(sample.ids) for sample in batch.samples]
    if sharing != "off":
        check_fits(lengths, budget)
        return _shared_plans(batch, by_sample, budget, ranks, sharing)
    shares = spread(lengths, ranks)
    tokens = [pair_tokens(pair) for pair in batch.pairs]
    return [
        RankPlan(
            _microbatches(share, lengths, by_sample, budget, packed), *_by_size(own, tokens, budget)
        )
        for share, own in zip(shares, spread(tokens, ranks), strict=True)
    ]


def rounds_of(batch: StepBatch, plans: Sequence[RankPlan], budget: int) -> ForwardCounts:
    """Return the common number of forwards for these plans; the same on every rank."""
    trained = [max(one.forwards for one in row) for row in _at_once(plans)]
    pairs = max(len(pair_groups(batch.pairs, plan.pairs, budget)) for plan in plans)
    large = max(len(plan.large_pairs) for plan in plans)
    return ForwardCounts(trained, pairs, large)


def teacher_rounds(
    batch: StepBatch, plans: Sequence[RankPlan], budget: int, sharing: Sharing = "off"
) -> list[int]:
    """Return the forwards of a sharded teacher in each microbatch: those of the busiest rank."""

    def forwards(views: Sequence[HintedView]) -> int:
        groups = teacher_groups(views, budget, sharing)
        return sum(
            _forwards([views[one].teacher_ids for one in group], sharing) for group in groups
        )

    return [
        max(forwards([batch.views[place] for place in one.views]) for one in row)
        for row in _at_once(plans)
    ]


def reference_rounds(
    batch: StepBatch, plans: Sequence[RankPlan], sharing: Sharing = "off"
) -> list[int]:
    """Return the forwards of a sharded reference, which scores the samples of each microbatch."""
    return [
        max(_forwards([batch.samples[place].ids for place in one.samples], sharing) for one in row)
        for row in _at_once(plans)
    ]


def _forwards(sequences: Sequence[list[int]], sharing: Sharing) -> int:
    """Return how many forwards of a model compute some sequences, none if there are none."""
    if not sequences or sharing == "off":
        return min(1, len(sequences))
    return PrefixTree.planned(sequences, sharing).forwards


def _at_once(plans: Sequence[RankPlan]) -> list[tuple[Microbatch, ...]]:
    """Return the microbatches that ranks train at the same time, empty ones where one has none."""
    empty = Microbatch([], [])
    return list(zip_longest(*(plan.microbatches for plan in plans), fillvalue=empty))


def pair_sides(pair: PairSample) -> list[list[int]]:
    """Return the ids of both sides of a pair: the chosen one, then the rejected one."""
    return [pair.context_ids + answer for answer in (pair.chosen_ids, pair.rejected_ids)]


def pair_groups(pairs: Sequence[PairSample], places: Sequence[int], budget: int) -> list[list[int]]:
    """Group pairs that fit the budget, by index in the batch, into shared forwards."""
    groups = microbatches([pair_tokens(pairs[place]) for place in places], budget)
    return [[places[index] for index in group] for group in groups]


def teacher_groups(
    views: Sequence[HintedView], budget: int, sharing: Sharing = "off"
) -> list[list[int]]:
    """Group indices of views whose hinted contexts share a forward of a teacher."""
    lengths = [len(view.teacher_ids) for view in views]
    if sharing == "off":
        return microbatches(lengths, budget)
    check_fits(lengths, budget)
    parts = parts_of([[view.teacher_ids] for view in views], budget, sharing)
    groups = shared_microbatches(parts, budget, sharing)
    return [[unit for index in group for unit in parts[index].units] for group in groups]


def pair_tokens(pair: PairSample) -> int:
    """Return the padded tokens of both sides of a pair."""
    return 2 * (len(pair.context_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)))


def split_views(views: Sequence[HintedView], parts: int) -> list[range]:
    """Divide views into contiguous runs of about equal tokens, one for each teacher; some empty."""
    ends = list(accumulate(len(view.teacher_ids) for view in views))
    total = ends[-1] if ends else 0
    # A view belongs to the part that contains its middle token.
    owners = [
        min(parts - 1, (2 * end - len(view.teacher_ids)) * parts // (2 * total))
        for view, end in zip(views, ends, strict=True)
    ]
    counts = [owners.count(part) for part in range(parts)]
    starts = [0, *accumulate(counts)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def _by_size(
    places: Sequence[int], tokens: Sequence[int], budget: int
) -> tuple[list[int], list[int]]:
    """Return the places whose tokens fit the budget, and those that exceed it."""
    fitting = [place for place in places if tokens[place] <= budget]
    return fitting, [place for place in places if tokens[place] > budget]


def _microbatches(
    share: Sequence[int],
    lengths: Sequence[int],
    by_sample: dict[int, list[int]],
    budget: int,
    packed: bool,
) -> list[Microbatch]:
    groups = microbatches([lengths[place] for place in share], budget, packed)
    found = []
    for group in groups:
        samples = [share[index] for index in group]
        views = [view for sample in samples for view in by_sample.get(sample, [])]
        found.append(Microbatch(samples, views))
    return sorted(found, key=lambda microbatch: bool(microbatch.views))


def _shared_plans(
    batch: StepBatch,
    by_sample: dict[int, list[int]],
    budget: int,
    ranks: int,
    sharing: Sharing,
) -> list[RankPlan]:
    """Divide samples and pairs, of which those that begin alike stay together.

    Pairs that begin like no sample have microbatches of their own, as without sharing.
    """
    tokens = [PrefixTree.planned(pair_sides(pair), sharing).computed for pair in batch.pairs]
    pairs, large = _by_size(range(len(tokens)), tokens, budget)
    units = [[sample.ids] for sample in batch.samples]
    units += [pair_sides(batch.pairs[place]) for place in pairs]
    parts = balanced_parts(units, budget, ranks, sharing)
    plans = []
    alone = spread([tokens[place] for place in large], ranks)
    shares = spread([part.tokens for part in parts], ranks)
    for share, others in zip(shares, alone, strict=True):
        own = [parts[index] for index in share]
        with_samples = [one for one in own if min(one.units) < len(batch.samples)]
        without = [one for one in own if min(one.units) >= len(batch.samples)]
        micros = [
            _shared([kind[index] for index in one], batch, pairs, by_sample, sharing)
            for kind in (with_samples, without)
            for one in shared_microbatches(kind, budget, sharing)
        ]
        ordered = sorted(micros, key=lambda one: bool(one.views))
        plans.append(RankPlan(ordered, [], [large[index] for index in others]))
    return plans


def _shared(
    parts: Sequence[SharedPart],
    batch: StepBatch,
    fitting: Sequence[int],
    by_sample: dict[int, list[int]],
    sharing: Sharing,
) -> Microbatch:
    """Return the microbatch of some parts, whose units are the samples and then `fitting` pairs."""
    first_pair = len(batch.samples)
    units = [unit for part in parts for unit in part.units]
    samples = [unit for unit in units if unit < first_pair]
    views = [view for sample in samples for view in by_sample.get(sample, [])]
    pairs = [fitting[unit - first_pair] for unit in units if unit >= first_pair]
    sequences = [batch.samples[place].ids for place in samples]
    sequences += [side for place in pairs for side in pair_sides(batch.pairs[place])]
    return Microbatch(samples, views, pairs, _forwards(sequences, sharing))


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
                channels={
                    channel: [one for one in found if one.trace_id in names]
                    for channel, found in batch.channels.items()
                },
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
