"""One island: what happens between its trainer's steps and the rounds of all fragments.

Knows no model: it reads and writes flat float32 vectors of named weights.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.all_reduce import Clock, ObjectStoreAllReduce
from composer_mesh.plugins.islands.rounds.fragment_sync import LAST, FragmentSync
from composer_mesh.plugins.islands.rounds.fragments import Fragment, FragmentSchedule, cut
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector, make_outer
from composer_mesh.plugins.islands.rounds.rounds import RoundRules
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.plugins.islands.store.port import ObjectStore, StoreUnfit
from composer_mesh.plugins.islands.store.retrying import RetryingStore
from composer_mesh.plugins.islands.store.write_once import decide

LAYOUT = "layout"
FIGURES = ("merged", "lost", "late", "dropped", "refused")


class Weights(Protocol):
    """The trained weights of an island."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def read(self, names: Sequence[str]) -> Vector:
        """Return a copy of these weights, one after the other."""
        ...

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


class IslandPort(Protocol):
    """What a trainer asks of its island, whatever the islands meet by."""

    def join(self) -> bool: ...
    def restore(self, step: int, kept: Mapping[str, Vector]) -> None: ...
    def kept(self) -> dict[str, Vector]: ...
    def after_step(self, step: int) -> dict[str, float]: ...
    def figures(self, waited_s: float = 0.0) -> dict[str, float]: ...
    def new_events(self) -> list[tuple[str, str]]: ...


class Island:
    """The rounds of all fragments of one run, by an object store; an `IslandPort`.

    Raises `StoreUnfit`, and `OtherIslands` where the other islands train something else.
    """

    def __init__(
        self,
        config: IslandsConfig,
        steps: int,
        weights: Weights,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert config.store is not None, "a run without islands.store is no island"
        opened = store or open_store(config.store, config.request_s)
        self._config, self._weights, self._steps = config, weights, steps
        self._clock = clock or Clock()
        self._store = RetryingStore(opened, config.request_s, self._clock.sleep)
        self._fragments = cut(weights.sizes, config.fragments)
        self._told: list[tuple[str, str]] = []
        self._check_layout()
        self._syncs = [self._sync(one) for one in self._fragments]
        self._schedules = schedules(config, steps)
        self._reported = self._totals()

    def join(self) -> bool:
        """Start from the newest common weights; return whether they are not the run's own."""
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
        return changed

    def restore(self, step: int, kept: Mapping[str, Vector]) -> None:
        """Go on after the checkpoint of a step, with what `kept` returned for it."""
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
        """Return what a checkpoint stores for `restore`, beside the weights."""
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

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events since the last call: kind and text."""
        told, self._told = self._told, []
        return told

    def _tell(self, kind: str, text: str) -> None:
        self._told.append((kind, text))

    def _sync(self, fragment: Fragment) -> FragmentSync:
        config = self._config
        rules = RoundRules(
            config.world_size,
            config.quorum,
            config.deadline_s,
            config.max_staleness,
            config.absent_after,
        )
        reduce = ObjectStoreAllReduce(
            self._store,
            config.rank,
            config.world_size,
            group=f"fragment-{fragment.index:04d}",
            rules=rules,
            quantization=config.quantization,
            clock=self._clock,
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

    def _totals(self) -> dict[str, float]:
        traffic = self._store.traffic
        counts = [sync.counts for sync in self._syncs]
        totals = {name: float(sum(getattr(one, name) for one in counts)) for name in FIGURES}
        return {
            **{f"islands/{name}": value for name, value in totals.items()},
            "islands/bytes_sent": traffic.sent,
            "islands/bytes_received": traffic.received,
            "islands/retries": traffic.retries,
        }

    def figures(self, waited_s: float = 0.0) -> dict[str, float]:
        """Return what happened since the last call."""
        before, now = self._reported, self._totals()
        self._reported = now
        return {
            **{name: value - before[name] for name, value in now.items()},
            "islands/round": min(sync.round for sync in self._syncs),
            "islands/contributors": max(sync.counts.contributors for sync in self._syncs),
            "time/islands_s": waited_s,
        }
