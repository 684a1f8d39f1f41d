"""The rules of a round, without a store or a clock.

    round r: weights of r-1 -> contributions -> manifest, written once -> mean -> weights of r

A contribution is an island's outer gradient: the weights of round `base` minus the island's own. An
island has at most one for each base. Whoever finds a round complete writes its manifest; the store
lets one manifest win, and every island averages what it lists.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from composer_mesh.configs.validation import validated


class Contribution(NamedTuple):
    """The name of a contribution: the round that it starts from, and its island."""

    base: int
    island: int


class RefusedContribution(NamedTuple):
    """A contribution that is in no average, and why."""

    base: int
    island: int
    why: str


@dataclass(frozen=True)
class Manifest:
    """What a round averages; written once, so that it is the same for every island.

    `digest` is the SHA-256 of the mean, which each island compares with its own.
    """

    round: int
    contributions: tuple[Contribution, ...]
    refused: tuple[RefusedContribution, ...]
    closed_by: int
    digest: str

    @property
    def islands(self) -> frozenset[int]:
        """Islands of which something is averaged."""
        return frozenset(one.island for one in self.contributions)


@dataclass(frozen=True)
class RoundRules:
    """When a round closes, and with which contributions.

    It closes once all expected islands have contributed, or after `deadline_s` with `quorum` of
    them. A contribution that is at most `max_staleness` rounds late is added to the next round.
    """

    world_size: int
    quorum: int = 1
    deadline_s: float = 600.0
    max_staleness: int = 1
    absent_after: int = 2

    def bases(self, round_number: int) -> range:
        """Return the rounds from which a contribution to this round may start."""
        return range(max(0, round_number - 1 - self.max_staleness), round_number)

    def is_manifest(self, round_number: int, table: Mapping[str, Any]) -> bool:
        """Whether a table is a manifest that islands under these rules may have written."""
        try:
            found = validated(Manifest, table)
        except ValidationError:
            return False
        bases, named = self.bases(round_number), {one.island for one in found.contributions}
        known = all(0 <= island < self.world_size for island in named)
        in_time = all(one.base in bases for one in found.contributions)
        return found.round == round_number and bool(named) and known and in_time

    def earlier(self, round_number: int) -> range:
        """Return the rounds whose manifests decide about this one."""
        first = round_number - max(self.max_staleness, self.absent_after)
        return range(max(1, first), round_number)

    def is_open(
        self, one: Contribution, round_number: int, earlier: Mapping[int, Manifest]
    ) -> bool:
        """Whether a contribution may be part of a round: not too late, and not used before."""
        used = (one in manifest.contributions for manifest in earlier.values())
        return one.base in self.bases(round_number) and not any(used)

    def expected(self, round_number: int, earlier: Mapping[int, Manifest]) -> frozenset[int]:
        """Return the islands that a round waits for."""
        if round_number <= self.absent_after:
            return frozenset(range(self.world_size))
        latest = range(round_number - self.absent_after, round_number)
        return frozenset(
            island for number in latest if number in earlier for island in earlier[number].islands
        )

    def may_close(self, islands: Collection[int], expected: Iterable[int], waited_s: float) -> bool:
        """Whether a round with contributions of these islands may close after such a wait."""
        if len(islands) < self.quorum:
            return False
        return waited_s >= self.deadline_s or set(expected) <= set(islands)


class Unanswered:
    """An island's contributions that no manifest has named yet."""

    def __init__(self, island: int, max_staleness: int) -> None:
        self._island, self._max_staleness = island, max_staleness
        self._bases: set[int] = set()

    def sent(self, base: int) -> None:
        """Remember a contribution."""
        self._bases.add(base)

    def answered(self, manifests: Sequence[Manifest]) -> list[tuple[str, str]]:
        """Return what successive manifests say of contributions that missed their own round.

        Each is `late` (added to a later round), `refused` or `dropped`, with the reason.
        """
        found: list[tuple[str, str]] = []
        for manifest in manifests:
            used = {one.base for one in manifest.contributions if one.island == self._island}
            found += [
                ("late", f"added to round {manifest.round}, {manifest.round - 1 - base} late")
                for base in sorted(self._bases & used)
                if base < manifest.round - 1
            ]
            self._bases -= used
            for base, island, why in manifest.refused:
                if island == self._island and base in self._bases:
                    self._bases.remove(base)
                    found.append(("refused", f"in round {manifest.round}: it {why}"))
            for base in sorted(self._bases):
                if manifest.round - base > self._max_staleness:
                    self._bases.remove(base)
                    why = f"round {manifest.round} closed without it; max_staleness is "
                    found.append(("dropped", f"{why}{self._max_staleness}"))
        return found
