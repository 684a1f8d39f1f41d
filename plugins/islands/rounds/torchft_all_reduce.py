"""An average over islands that reach each other: rounds by torchft's Manager.

    quorum      the lighthouse names the islands of this round; those behind get the common weights
    headers     all compare what they start from; an island that heals contributes nothing
    average     all-reduce of float32 values, or all-gather of quantized ones
    checksums   all compare the mean
    commit      `should_commit`; anything that failed before it leaves the common weights alone

The Manager's step is the round. A round that failed is tried again until `deadline_s`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.all_reduce import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    Clock,
    RoundLost,
)
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    Vector,
    count_unusable,
    decode,
    encode,
)
from composer_mesh.plugins.islands.rounds.torchft_manager import IslandManager
from composer_mesh.plugins.islands.rounds.torchft_rules import (
    Header,
    LighthouseUnfit,
    NoAverage,
    OtherLayout,
    RecoveredWithoutAverage,
    StartedFromOtherWeights,
    check_same_mean,
    contributors,
)
from composer_mesh.plugins.islands.store.opening import Traffic

BEHIND = -1
"""A step before every other, so that the Manager heals this island in the next quorum."""


class CommonState(Protocol):
    """The common state, which torchft gives to islands that come or come back."""

    def dump(self) -> Vector: ...
    def load(self, values: Vector) -> None: ...


@dataclass(frozen=True)
class Offer:
    """What an island offers to a round; `payload` is None where its values are not finite."""

    payload: bytes | None
    size: int
    base: bytes


@dataclass(frozen=True)
class RoundOutcome:
    """A committed round: its mean, whose contributions it averages, and whether mine is among them.

    `present` are the islands of the quorum: with those that healed, and got the common state of
    before this round.
    """

    round: int
    mean: Vector
    islands: tuple[int, ...]
    present: tuple[int, ...]
    gave: bool


class TorchftAllReduce:
    """Averages float32 vectors of islands, round by round, each for those of one `layout`.

    Raises `LighthouseUnfit` for an address that cannot be used.
    """

    def __init__(
        self, config: IslandsConfig, layout: bytes, state: CommonState, clock: Clock
    ) -> None:
        self.rank, self.deadline_s = config.rank, config.deadline_s
        self.round = 0
        """Committed rounds that this island knows."""
        self.traffic = Traffic()
        """What the algorithms of gloo send and receive for the values, and failed attempts."""
        self._config, self._layout, self._state, self._clock = config, layout, state, clock
        self._alone = config.world_size == 1
        self._joined = None if self._alone else self._join()

    def start_after(self, number: int) -> None:
        """Continue after a round, as an island that was restored."""
        self.round = number
        self._tell_round(number)

    def average(self, offer: Callable[[int], Offer]) -> RoundOutcome:
        """Take part in the next round; `offer` gets its number, counted from 0.

        Waits for the others, at most the deadline and one request. Raises `RoundLost`, and
        `OtherLayout` where the other islands train something else.
        """
        if self._alone:
            return self._by_itself(offer)
        began, pause = self._clock.now(), FIRST_POLL_S
        while True:
            left = max(0.0, self.deadline_s - (self._clock.now() - began))
            try:
                return self._attempt(offer, left)
            except NoAverage as error:
                late = self._clock.now() - began >= self.deadline_s
                if late or isinstance(error, RecoveredWithoutAverage):
                    raise RoundLost(self.round + 1, str(error)) from error
                self.traffic.retries += 1
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def close(self) -> None:
        """Leave, so that the other islands continue without this one."""
        self._leave()

    def _join(self) -> IslandManager:
        found = IslandManager(
            self._config, self._layout, self._state.dump, self._state.load, self.traffic.count
        )
        found.manager.load_state_dict({"step": self.round, "batches_committed": 0})
        return found

    def _attempt(self, offer: Callable[[int], Offer], left_s: float) -> RoundOutcome:
        """Try a round once; raises `NoAverage` where it was not committed."""
        try:
            if self._joined is None:
                self._joined = self._join()
            manager = self._joined.manager
            before = int(manager.current_step())
            manager.start_quorum(timeout=timedelta(seconds=max(left_s, 0.001)))
            manager.wait_quorum()
        except (LighthouseUnfit, RuntimeError, TimeoutError) as error:
            self._leave()  # this Manager would raise it in every later round
            raise NoAverage(f"the lighthouse formed no quorum: {error}") from error
        healed, outcome = int(manager.current_step()) != before, None
        if manager.current_step() == BEHIND:  # there is nobody to heal from
            self._tell_round(self.round)
        self.round = int(manager.current_step())
        try:
            self._check(manager)
            outcome = self._averaged(self.round, offer(self.round))
        except (RuntimeError, NoAverage, OtherLayout) as error:
            manager.report_error(error)
        try:
            if manager.should_commit():
                assert outcome is not None
                self.round = int(manager.current_step())
                return outcome
            failure = self._failure(manager)
        except (RuntimeError, TimeoutError) as error:
            self._leave()
            failure = NoAverage(f"round {self.round + 1} was not committed: {error}")
        if healed:
            raise RecoveredWithoutAverage(f"it came back with those of round {self.round}")
        raise failure

    def _failure(self, manager: Any) -> NoAverage:
        """Return why a round was not committed; raises where no later one could be either."""
        failed = manager.errored()
        error = None if failed is None else failed.original_exception
        if isinstance(error, OtherLayout):
            raise error
        if isinstance(error, StartedFromOtherWeights):
            self._tell_round(BEHIND)
        if isinstance(error, NoAverage):
            return error
        if error is not None:
            return NoAverage(f"round {self.round + 1} broke: {error}")
        there = manager.num_participants()
        return NoAverage(f"{there} islands take part but the quorum is {self._config.quorum}")

    def _tell_round(self, number: int) -> None:
        if self._joined is not None:
            self._joined.manager.load_state_dict({"step": number, "batches_committed": 0})

    def _leave(self) -> None:
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    def _averaged(self, number: int, offer: Offer) -> RoundOutcome:
        """Return the mean, which all islands of the quorum have computed."""
        assert self._joined is not None
        manager = self._joined.manager
        part = bool(manager.is_participating())
        gives = part and offer.payload is not None
        own = Header(self.rank, part, gives, offer.base, self._layout)
        headers = [Header.unpacked(one) for one in self._gathered(own.packed())]
        places = contributors(own, headers, self._config.quorum, self._config.world_size)
        if self._config.quantization == "none":
            mean = self._summed(offer, gives, len(headers)) / np.float32(len(places))
        else:
            mean = self._decoded(offer, gives, places)
        if bad := count_unusable(mean):
            raise NoAverage(f"the mean has {bad} values like NaN, or too large")
        check_same_mean(self._gathered(hashlib.sha256(mean.tobytes()).digest()))
        islands = tuple(sorted(headers[place].rank for place in places))
        present = tuple(sorted(one.rank for one in headers))
        return RoundOutcome(number + 1, mean, islands, present, gives)

    def _summed(self, offer: Offer, gives: bool, there: int) -> Vector:
        assert self._joined is not None
        manager = self._joined.manager
        total = torch.zeros(offer.size)
        if gives:
            assert offer.payload is not None
            total.copy_(torch.from_numpy(decode(offer.payload, offer.size, "none")))
        manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
        self._check(manager)
        ring = 2 * total.nbytes * (there - 1) // there
        self.traffic.count(ring, ring)
        found: Vector = total.numpy()
        return found

    def _decoded(self, offer: Offer, gives: bool, places: list[int]) -> Vector:
        """Return the mean of quantized values, summed in the same order everywhere."""
        how = self._config.quantization
        nothing = encode(np.zeros(offer.size, np.float32), how).payload
        payloads = self._gathered(offer.payload if gives and offer.payload else nothing)
        total = np.zeros(offer.size, np.float32)
        for place in places:
            try:
                total += decode(payloads[place], offer.size, how)
            except ValueError as error:
                raise NoAverage(f"a contribution {error}") from error
        return total / np.float32(len(places))

    def _gathered(self, data: bytes) -> list[bytes]:
        """Return each island's bytes, of one length, in the order of the process group."""
        assert self._joined is not None
        group = self._joined.group
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(group.size())]
        group.allgather([found], [own], AllgatherOptions()).wait()
        moved = (len(found) - 1) * len(data)
        self.traffic.count(moved, moved)
        return [one.numpy().tobytes() for one in found]

    @staticmethod
    def _check(manager: Any) -> None:
        """Raise what the Manager has kept of an error."""
        failed = manager.errored()
        if failed is None:
            return
        error = failed.original_exception
        known = isinstance(error, NoAverage | OtherLayout)
        raise error if known else NoAverage(str(error) or repr(error)) from error

    def _by_itself(self, offer: Callable[[int], Offer]) -> RoundOutcome:
        given = offer(self.round)
        if given.payload is None:
            raise RoundLost(self.round + 1, "its own values are not finite")
        mean = decode(given.payload, given.size, self._config.quantization)
        self.round += 1
        return RoundOutcome(self.round, mean, (self.rank,), (self.rank,), True)
