"""One island: what happens between its trainer's steps and the rounds of all fragments.

Knows no model: it reads and writes flat float32 vectors of named weights.

Weights are cut into fragments, whose rounds take turns as in Streaming DiLoCo (2501.18512):

steps       1 . . 4 . . . 8 . . . 12        4 steps a round in 2 fragments, overlap of 1:
fragment 0          b m       b m           `b`: its outer gradient is taken and sent
fragment 1      b m       b m               `m`: the round's result is merged
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.all_reduce import Clock, ObjectStoreAllReduce
from composer_mesh.plugins.islands.rounds.fragment_sync import LAST, Counts, FragmentSync
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector, make_outer
from composer_mesh.plugins.islands.rounds.rounds import RoundRules
from composer_mesh.plugins.islands.store.blobs import decide
from composer_mesh.plugins.islands.store.opening import (
    ObjectStore,
    RetryingStore,
    StoreUnfit,
    Traffic,
    open_store,
)


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


LAYOUT = "layout"
FIGURES = ("merged", "lost", "late", "dropped", "refused")


class IslandWeights(Protocol):
    """The trained weights of an island."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def read(self, names: Sequence[str]) -> Vector:
        """Return a copy of these weights, one after the other."""

    def write(self, names: Sequence[str], values: Vector) -> None: ...


def schedules(config: IslandsConfig, steps: int) -> list[FragmentSchedule]:
    """Return when the rounds of each fragment begin and end; fragments take turns.

    With a lighthouse there is one schedule for all fragments: the round says which one it is.
    """
    apart = config.steps_per_round // config.fragments
    if config.lighthouse is not None:
        return [FragmentSchedule(apart, 0, config.overlap_steps, steps)]
    return [
        FragmentSchedule(config.steps_per_round, place * apart, config.overlap_steps, steps)
        for place in range(config.fragments)
    ]


def layout_of(config: IslandsConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what has to be equal on all islands, whatever they meet by."""
    names = json.dumps(list(sizes.items()))
    return {
        "weights": hashlib.sha256(names.encode()).hexdigest(),
        "fragments": config.fragments,
        "quantization": config.quantization,
        "outer": config.outer.model_dump(mode="json"),
        "world_size": config.world_size,
    }


class OtherIslands(StoreUnfit):
    """The store has rounds of islands with another model or other rules."""


class IslandPort(ABC):
    """What a trainer asks of its island, whatever the islands meet by."""

    def __init__(self) -> None:
        self._events: list[tuple[str, str]] = []
        self._reported: dict[str, float] = {}

    @property
    @abstractmethod
    def counts(self) -> list[Counts]:
        """What happened to the rounds so far, in one or several parts."""

    @property
    @abstractmethod
    def round(self) -> int:
        """Rounds of which this island has the common weights."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Bytes that were sent and received so far."""

    @abstractmethod
    def join(self) -> None:
        """Start a run, from the weights of the others if they have some."""

    @abstractmethod
    def restore(self, step: int, kept: Mapping[str, Vector]) -> None:
        """Resume after the checkpoint of a step, with what `kept` returned for it."""

    @abstractmethod
    def kept(self) -> dict[str, Vector]:
        """Return what a checkpoint stores for `restore`, besides the weights."""

    @abstractmethod
    def after_step(self, step: int) -> dict[str, float]:
        """Begin and end what is due after a trained step; return figures of this step."""

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events since the last call: kind and text."""
        events, self._events = self._events, []
        return events

    def figures(self, waited_s: float = 0.0) -> dict[str, float]:
        """Return what happened since the last call."""
        traffic, counts = self.traffic, self.counts
        now: dict[str, float] = {
            "islands/bytes_sent": traffic.sent,
            "islands/bytes_received": traffic.received,
            "islands/retries": traffic.retries,
        }
        now |= {f"islands/{name}": sum(getattr(one, name) for one in counts) for name in FIGURES}
        before, self._reported = self._reported, now
        return {
            **{name: value - before.get(name, 0.0) for name, value in now.items()},
            "islands/round": self.round,
            "islands/contributors": max(one.contributors for one in counts),
            "time/islands_s": waited_s,
        }

    def _tell(self, kind: str, text: str) -> None:
        self._events.append((kind, text))


class Island(IslandPort):
    """The rounds of all fragments of one run, by an object store.

    Raises `StoreUnfit`, and `OtherIslands` where the other islands train something else.
    """

    def __init__(
        self,
        config: IslandsConfig,
        steps: int,
        weights: IslandWeights,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert config.store is not None, "a run without islands.store is not an island"
        super().__init__()
        opened = store or open_store(config.store, config.request_s)
        self._config, self._weights, self._steps = config, weights, steps
        self._clock = clock or Clock()
        self._store = RetryingStore(opened, config.request_s, self._clock.sleep)
        self._fragments = cut(weights.sizes, config.fragments)
        self._check_layout()
        self._syncs = [self._sync(one) for one in self._fragments]
        self._schedules = schedules(config, steps)

    @property
    def counts(self) -> list[Counts]:
        return [sync.counts for sync in self._syncs]

    @property
    def round(self) -> int:
        return min(sync.round for sync in self._syncs)

    @property
    def traffic(self) -> Traffic:
        return self._store.traffic

    def join(self) -> None:
        """Start from the newest common weights."""
        changed = False
        for fragment, sync in zip(self._fragments, self._syncs, strict=True):
            own = self._weights.read(list(fragment.sizes))
            common = sync.join(own)
            if not (common == own).all():
                self._weights.write(list(fragment.sizes), common)
                changed = True
        if changed:
            rounds = self._syncs[0].round
            self._tell("island_joined", f"starts from the common weights of round {rounds}")

    def restore(self, step: int, kept: Mapping[str, Vector]) -> None:
        """Continue after the checkpoint of a step, with what `kept` returned for it."""
        for fragment, sync, schedule in zip(
            self._fragments, self._syncs, self._schedules, strict=True
        ):
            common = sync.restore(
                schedule.last_merge(step),
                fragment.size,
                kept.get(f"{fragment.index}.residual"),
                kept.get(f"{fragment.index}.snapshot"),
            )
            if common is not None:
                self._weights.write(list(fragment.sizes), common)

    def kept(self) -> dict[str, Vector]:
        """Return what a checkpoint stores for `restore`, in addition to the weights."""
        return {
            f"{fragment.index}.{name}": vector
            for fragment, sync in zip(self._fragments, self._syncs, strict=True)
            for name, vector in sync.saved().items()
        }

    def after_step(self, step: int) -> dict[str, float]:
        """Begin and end what is due after a trained step; return figures of this step.

        Waits where a round ends, at most its deadline and some requests.
        """
        began, last = self._clock.now(), step == self._steps
        parts = list(zip(self._fragments, self._syncs, self._schedules, strict=True))
        for fragment, sync, schedule in parts:
            names = list(fragment.sizes)
            if last and sync.under_way:  # its result comes first: the last round is of all steps
                self._merge(sync, names, str(step))
            if schedule.begins(step):
                sync.begin(self._weights.read(names))
        for fragment, sync, schedule in parts:
            if schedule.merges(step):
                self._merge(sync, list(fragment.sizes), f"{step}{LAST}" if last else str(step))
        if last:
            self.finish()
        return self.figures(self._clock.now() - began)

    def _merge(self, sync: FragmentSync, names: list[str], when: str) -> None:
        own = self._weights.read(names)
        merged = sync.merge(when, own)
        if merged is not own:
            self._weights.write(names, merged)

    def finish(self) -> None:
        """Wait until the store has what this island writes."""
        for sync in self._syncs:
            sync.finish()

    def _sync(self, fragment: Fragment) -> FragmentSync:
        config = self._config
        rules = RoundRules(
            config.world_size,
            config.quorum,
            config.deadline_s,
            config.max_staleness,
            config.absent_after,
        )
        group = f"fragment-{fragment.index:04d}"
        reduce = ObjectStoreAllReduce(
            self._store, config.rank, group, rules, config.quantization, self._clock
        )
        return FragmentSync(
            reduce,
            make_outer(config.outer),
            config.member or f"{config.rank:016x}",
            self._tell,
            config.rounds_kept,
            config.mixing,
        )

    def _check_layout(self) -> None:
        """Refuse islands that would average different weights, or in another way."""
        own: dict[str, Any] = {
            **layout_of(self._config, self._weights.sizes),
            "max_staleness": self._config.max_staleness,
            "absent_after": self._config.absent_after,
        }
        found = decide(self._store, LAYOUT, own)
        other = [name for name, value in own.items() if found.get(name) != value]
        if other:
            raise OtherIslands(
                f"{self._config.store} has rounds of islands with other {', '.join(other)} than "
                f"island {self._config.rank}: give all islands one config, or a new store"
            )
