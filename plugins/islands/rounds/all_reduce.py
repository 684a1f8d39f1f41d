"""An average over islands that meet only in an object store.

    GROUP/contributions/BASE/ISLAND   a blob: an outer gradient, encoded, with checksums
    GROUP/rounds/ROUND                a register: the manifest that closed the round, for good

No island coordinates: each reads the same objects, and any of them closes a round. Only a manifest
decides what is averaged, and it is written conditionally, so late listings, repeated writes and
wrong clocks can delay a round but not change it.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from composer_mesh.configs.validation import validated
from composer_mesh.configs.worded import Worded
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    Quantization,
    Vector,
    decode,
    payload_bytes,
)
from composer_mesh.plugins.islands.rounds.rounds import (
    Contribution,
    Manifest,
    RefusedContribution,
    RoundRules,
)
from composer_mesh.plugins.islands.store.blobs import (
    BETWEEN_READS_S,
    READS,
    decide,
    decided,
    head_of,
    is_payload,
    payload_of,
    put_blob,
)
from composer_mesh.plugins.islands.store.opening import CorruptObject, ObjectStore

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0
POLL_SHARE = 0.05
"""Pause before the next look at a round, as a share of the wait so far: a round that has closed is
found that much later at most, and a wait of a minute has some hundred looks."""


class RoundLost(Worded, Exception):
    """A round did not close within its deadline: its number, and what is missing."""

    message = "round {0} has not closed: {1}"


class WrongMean(Worded, Exception):
    """An island computed another mean than the manifest says, so it uses none."""

    message = "the mean of round {0} cannot be used: {1}"


@dataclass(frozen=True)
class Clock:
    """This process's monotonic clock and its sleep; no other clock is compared with it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class ObjectStoreAllReduce:
    """Averages float32 vectors of the islands, round by round; `group` keeps averages apart."""

    def __init__(
        self,
        store: ObjectStore,
        rank: int,
        group: str,
        rules: RoundRules,
        quantization: Quantization,
        clock: Clock,
    ) -> None:
        self.store, self.rank, self.group, self.rules = store, rank, group, rules
        self.quantization: Quantization = quantization
        self._clock = clock
        self._manifests: dict[int, Manifest] = {}
        self._read: dict[Contribution, bytes] = {}
        self._refused: dict[Contribution, str] = {}

    def contribute(self, base: int, payload: bytes, size: int) -> bool:
        """Write this island's encoded contribution that starts from a round.

        Returns whether it is the one that counts: an earlier process of this island may have
        written another one.
        """
        mine = Contribution(base, self.rank)
        about = {"island": self.rank, "base": base, "size": size, "how": self.quantization}
        head = put_blob(self.store, self._place(mine), payload, about, sleep=self._clock.sleep)
        counts = head.about == about and is_payload(head, payload)
        if counts:
            self._read[mine] = payload  # it need not be read back
        return counts

    def close(self, round_number: int, size: int) -> Manifest:
        """Return the manifest of a round. Waits for its contributions, and closes it if nobody has.

        Contributions of another size than `size` are refused, as broken ones are. Raises
        `RoundLost` if there is no quorum after the deadline.
        """
        began = self._clock.now()
        while True:
            if (manifest := self.manifest(round_number)) is not None:
                return manifest
            found = self._intact(round_number, size)
            waited = self._clock.now() - began
            islands = {one.island for one in found}
            expected = self.rules.expected(round_number, self._earlier(round_number))
            if self.rules.may_close(islands, expected, waited):
                return self._decide(round_number, sorted(found), size)
            if waited >= self.rules.deadline_s:
                raise RoundLost(
                    round_number,
                    f"{len(islands)} islands have contributed after {waited:.0f} s but the quorum "
                    f"is {self.rules.quorum}",
                )
            pause = min(max(FIRST_POLL_S, POLL_SHARE * waited), LONGEST_POLL_S)
            self._clock.sleep(min(pause, max(0.0, self.rules.deadline_s - waited)))

    def manifest(self, round_number: int) -> Manifest | None:
        """Return the manifest of a round; None as long as it is open."""
        if round_number not in self._manifests:
            key = self._round_key(round_number)
            is_value = partial(self.rules.is_manifest, round_number)
            table = decided(self.store, key, self._clock.sleep, is_value)
            if table is None:
                return None
            self._manifests[round_number] = validated(Manifest, table)
        return self._manifests[round_number]

    def newest(self, known: int = 0) -> int:
        """Return the newest closed round, at least `known`; 0 if none is.

        Rounds close one after the other and stay, so that it doubles its steps until one is open,
        and halves them. Listings may be late, and may name what nobody of the islands has written.
        """
        step = 1
        while self.manifest(known + step) is not None:
            known, step = known + step, 2 * step
        while step := step // 2:
            if self.manifest(known + step) is not None:
                known += step
        return known

    def mean(self, manifest: Manifest, size: int) -> Vector:
        """Return a round's mean: the sum of its contributions over its number of islands.

        Raises `WrongMean` where contributions are gone or the result is not the manifest's.
        """
        try:
            mean = self._mean_of(manifest.contributions, size)
        except (CorruptObject, ValueError) as error:
            raise WrongMean(manifest.round, str(error)) from error
        if digest_of(mean) != manifest.digest:
            raise WrongMean(manifest.round, f"its checksum is not {manifest.digest[:12]}")
        return mean

    def forget(self, before: int) -> None:
        """Drop what is held of contributions that start before a round."""
        self._read = {one: data for one, data in self._read.items() if one.base >= before}

    def _decide(self, round_number: int, found: list[Contribution], size: int) -> Manifest:
        """Write a manifest; return the one that has won."""
        digest = digest_of(self._mean_of(tuple(found), size))
        refused = tuple(
            RefusedContribution(*one, why)
            for one, why in sorted(self._refused.items())
            if one.base in self.rules.bases(round_number)
        )
        mine = Manifest(round_number, tuple(found), refused, self.rank, digest)
        key = self._round_key(round_number)
        is_value = partial(self.rules.is_manifest, round_number)
        table = decide(self.store, key, asdict(mine), self._clock.sleep, is_value)
        self._manifests[round_number] = validated(Manifest, table)
        return self._manifests[round_number]

    def _intact(self, round_number: int, size: int) -> list[Contribution]:
        """Return the contributions that may be part of a round and can be read and decoded."""
        earlier = self._earlier(round_number)
        found = self._listed(round_number)
        found.add(Contribution(round_number - 1, self.rank))  # listings may be late
        may = [one for one in found if self.rules.is_open(one, round_number, earlier)]
        return [one for one in may if self._is_intact(one, size)]

    def _listed(self, round_number: int) -> set[Contribution]:
        found: set[Contribution] = set()
        for base in self.rules.bases(round_number):
            folder = f"{self.group}/contributions/{base:08d}/"
            for key in self.store.keys(folder):
                name = key.removeprefix(folder).partition(".")[0]
                number = number_of(name, 5)
                if number is not None and number < self.rules.world_size:
                    found.add(Contribution(base, number))
        return found

    def _is_intact(self, one: Contribution, size: int) -> bool:
        """Whether a contribution is there and whole; a broken one is refused for good."""
        if one in self._read or one in self._refused:
            return one in self._read
        for reads_left in reversed(range(READS)):
            try:
                return self._load(one, size)
            except (CorruptObject, ValueError) as error:
                self._refused[one] = str(error)
            if reads_left:
                self._clock.sleep(BETWEEN_READS_S)
        return False

    def _load(self, one: Contribution, size: int) -> bool:
        """Read a contribution unless it is held; return whether there is one."""
        if one in self._read:
            return True
        key = self._place(one)
        head = head_of(self.store, key, self._clock.sleep)
        if head is None:
            return False
        expected = {"island": one.island, "base": one.base, "size": size, "how": self.quantization}
        if head.about != expected:
            raise CorruptObject(key, f"says {head.about} but must say {expected}")
        payload = payload_of(self.store, head, payload_bytes(size, self.quantization))
        decode(payload, size, self.quantization)
        self._read[one] = payload
        self._refused.pop(one, None)
        return True

    def _earlier(self, round_number: int) -> dict[int, Manifest]:
        found = {number: self.manifest(number) for number in self.rules.earlier(round_number)}
        return {number: one for number, one in found.items() if one is not None}

    def _mean_of(self, contributions: tuple[Contribution, ...], size: int) -> Vector:
        total = np.zeros(size, np.float32)
        for one in contributions:
            if not self._load(one, size):
                raise CorruptObject(self._place(one), "is gone")
            total += decode(self._read[one], size, self.quantization)
        return total / np.float32(len({one.island for one in contributions}))

    def _place(self, one: Contribution) -> str:
        return f"{self.group}/contributions/{one.base:08d}/{one.island:05d}"

    def _round_key(self, number: int) -> str:
        return f"{self.group}/rounds/{number:08d}"


def number_of(name: str, digits: int) -> int | None:
    """Return the number in a part of a key that has so many digits; None for any other part."""
    return int(name) if len(name) == digits and name.isascii() and name.isdigit() else None


def digest_of(mean: Vector) -> str:
    """Return the SHA-256 of a vector's little-endian bytes."""
    return hashlib.sha256(mean.astype("<f4").tobytes()).hexdigest()
