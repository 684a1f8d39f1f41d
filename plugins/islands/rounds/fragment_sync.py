"""One fragment's rounds on one island: sends its outer gradient, merges what a round has made.

    begin   snapshot s of the weights; common weights w - s is encoded, written, and the round
            closed, all in a background thread
    merge   waits for that, at most the round's deadline; then, with the weights t of now,
            weights = new common weights + (t - s)

What is trained while a round is under way is thus kept, and part of the next outer gradient. A
round that did not close leaves the weights alone; the same contribution waits for the next merge.

    GROUP/states/ROUND/outer            a blob: common weights and the outer optimizer's arrays
    GROUP/merges/MEMBER/STEP            a register: which round this run merged after that step;
                                        STEP-last for the round that the run's last step opens

A run that trains steps again, because a process died, thereby merges the same rounds as before.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from composer_mesh.mesh.waiting import in_background
from composer_mesh.plugins.islands.rounds.all_reduce import (
    ObjectStoreAllReduce,
    RoundLost,
    WrongMean,
    number_of,
)
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    OuterOptimizer,
    OuterState,
    Vector,
    count_unusable,
    first_state,
    mixed,
    outer_gradient,
    state_bytes,
    state_of,
)
from composer_mesh.plugins.islands.rounds.rounds import Manifest, Unanswered
from composer_mesh.plugins.islands.store.blobs import (
    decide,
    decided,
    delete_folder,
    head_of,
    payload_of,
    put_blob,
)
from composer_mesh.plugins.islands.store.opening import CorruptObject, StoreUnavailable

LAST = "-last"
Tell = Callable[[str, str], None]
"""Receives an event: its kind and a text."""


@dataclass
class Counts:
    """What happened to a fragment's rounds."""

    merged: int = 0
    lost: int = 0
    late: int = 0
    dropped: int = 0
    refused: int = 0
    contributors: int = 0
    """Islands in the newest merged round."""


@dataclass
class PendingContribution:
    """A contribution that no round has answered yet, and the weights that it stands for.

    `payload` is None for weights that may not be sent. `residual` is the rounding error of earlier
    rounds that is part of it.
    """

    base: int
    snapshot: Vector
    payload: bytes | None
    residual: Vector | None
    closing: Future[Manifest]


@dataclass
class FragmentSync:
    """The fragment `group` of the island `member`; not to be used before `join` or `restore`."""

    reduce: ObjectStoreAllReduce
    outer: OuterOptimizer
    member: str
    tell: Tell
    rounds_kept: int = 8
    mixing: float = 0.0
    counts: Counts = field(default_factory=Counts)
    _state: OuterState | None = None
    _residual: Vector | None = None
    _pending: PendingContribution | None = None
    _storing: Future[None] | None = None

    def __post_init__(self) -> None:
        self._unanswered = Unanswered(self.reduce.rank, self.reduce.rules.max_staleness)
        self._states = f"{self.reduce.group}/states/"

    @property
    def under_way(self) -> bool:
        """Whether a contribution waits for a round that has not been given up."""
        closing = None if self._pending is None else self._pending.closing
        return closing is not None and not (closing.done() and closing.exception())

    @property
    def round(self) -> int:
        """The round whose common weights this island has."""
        return self._common.round

    def join(self, weights: Vector) -> Vector:
        """Return the common weights that a new run starts from: the newest, or else its own.

        A run that joins again at its start gets the weights it got before, if they are kept.
        """
        self._put_state(first_state(weights, self.outer))
        agreed = self._merged_after("0")
        target = self.reduce.newest() if agreed is None else agreed
        self._state = self._reached(target, weights.size)
        self._note("0", self.round)
        return self._common.weights.copy()

    def restore(
        self, merged_after: int, size: int, residual: Vector | None, snapshot: Vector | None
    ) -> Vector | None:
        """Continue after a checkpoint: `merged_after` is the last step up to it with a merge.

        Returns None if the common weights of that time are kept, else the newest ones, from which
        this island continues. `snapshot` is that of a round that was under way.
        """
        agreed = self._merged_after(f"{merged_after}{LAST}")
        if agreed is None:
            agreed = self._merged_after(str(merged_after))
        state = self._reached(self.reduce.newest() if agreed is None else agreed, size)
        if state.round == agreed:
            self._state, self._residual = state, residual
            if snapshot is not None:
                self._open(snapshot)
            return None
        self._state = self._advanced(state, self.reduce.newest(state.round))
        self.tell("island_rejoined", f"continues from the common weights of round {self.round}")
        return self._common.weights.copy()

    def begin(self, weights: Vector) -> None:
        """Take the outer gradient of these weights and send it, unless an earlier one waits.

        Weights that are not finite are not sent: the island takes the others' result.
        """
        old = self._pending
        if old is None:
            self._open(weights.copy())
        else:
            closing = in_background(self._sending(old.base, old.snapshot.size, old.payload))
            self._pending = replace(old, closing=closing)

    def _open(self, snapshot: Vector) -> None:
        """Send what was trained up to a snapshot, and wait for its round in the background."""
        base, before, common = self.round, self._residual, self._common.weights
        gradient = outer_gradient(common, snapshot, before, self.reduce.quantization)
        payload: bytes | None = None
        if gradient is not None:
            payload = gradient.payload
            if self.reduce.quantization != "none":
                self._residual = gradient.residual
            self._unanswered.sent(base)
        else:
            bad = count_unusable(common - snapshot)
            self.counts.refused += 1
            self.tell("contribution_refused", f"own outer gradient has {bad} values like NaN")
        closing = in_background(self._sending(base, snapshot.size, payload))
        self._pending = PendingContribution(base, snapshot, payload, before, closing)

    def _sending(self, base: int, size: int, payload: bytes | None) -> Callable[[], Manifest]:
        """Return the work of a round: the contribution, sent now or before, and the wait."""

        def work() -> Manifest:
            if payload is not None and not self.reduce.contribute(base, payload, size):
                why = f"from round {base} is that of an earlier process of this island"
                self.tell("contribution_kept", f"{self.reduce.group}: the one {why}")
            return self.reduce.close(base + 1, size)

        return work

    def merge(self, step: str, weights: Vector) -> Vector:
        """Return the weights to continue with after a step. Waits for the round opened by `begin`.

        They are the same object where no round has closed.
        """
        pending = self._pending
        try:
            if pending is None:  # of a round that this island came back too late for
                self._note(step, self.round)
                return weights
            return self._merged(step, weights, pending)
        except (RoundLost, WrongMean, StoreUnavailable) as error:
            self.counts.lost += 1
            self.tell("round_lost", f"{self.reduce.group}: {error}")
            return weights

    def saved(self) -> dict[str, Vector]:
        """Return what a checkpoint has to keep: a round under way is opened again from it."""
        pending, kept = self._pending, dict[str, Vector]()
        residual = self._residual if pending is None else pending.residual
        if residual is not None:
            kept["residual"] = residual
        if pending is not None:
            kept["snapshot"] = pending.snapshot
        return kept

    def finish(self) -> None:
        """Wait until the common weights that this island stores are written."""
        if self._storing is not None:
            self._storing.result()

    @property
    def _common(self) -> OuterState:
        assert self._state is not None, "join or restore comes first"
        return self._state

    def _merged(self, step: str, weights: Vector, pending: PendingContribution) -> Vector:
        agreed = self._merged_after(step)
        if agreed is None:
            agreed = self._note(step, self._closed(step, pending))
        if agreed == pending.base:
            raise RoundLost(pending.base + 1, "it had not when this step was trained before")
        self._state = self._advanced(self._common, agreed)
        self._pending = None
        self._count(pending.base)
        return mixed(self._common.weights, weights, pending.snapshot, self.mixing)

    def _closed(self, step: str, pending: PendingContribution) -> int:
        """Return the newest closed round, after the wait for the one that was opened."""
        try:
            pending.closing.result()
        except RoundLost:
            self._note(step, pending.base)
            raise
        return self.reduce.newest(pending.base + 1)

    def _reached(self, target: int, size: int) -> OuterState:
        """Return the state of a round, from the newest stored one before it."""
        start = self._stored_after(-1, target, size)
        if start is None:
            raise StoreUnavailable("read", f"{self.reduce.group}/states", "no common weights")
        return self._advanced(start, target)

    def _advanced(self, state: OuterState, target: int) -> OuterState:
        """Return the state of a round by computing the rounds since another state.

        Where contributions are gone it continues from a stored state, which may be a later one.
        """
        size = state.weights.size
        while state.round < target:
            manifest = self.reduce.manifest(state.round + 1)
            try:
                if manifest is None:
                    raise WrongMean(state.round + 1, "it has no manifest")
                state = self.outer.step(state, self.reduce.mean(manifest, size))
            except WrongMean as wrong:
                stored = self._stored_after(state.round, target, size)
                if stored is None:
                    raise
                self.tell("common_weights_read", f"{self.reduce.group}: {wrong}")
                state = stored
            else:
                if manifest.closed_by == self.reduce.rank and state.round == target:
                    self._store(state)
        return state

    def _store(self, state: OuterState) -> None:
        """Write a state, and remove what it makes unnecessary, in the background."""

        def work() -> None:
            try:
                self._put_state(state)
                self._collect_garbage(state.round - self.rounds_kept)
            except StoreUnavailable as error:
                self.tell("common_weights_not_stored", f"{self.reduce.group}: {error}")

        self._storing = in_background(work)

    def _put_state(self, state: OuterState) -> None:
        about = {"round": state.round, "size": state.weights.size}
        put_blob(self.reduce.store, self._state_key(state.round), state_bytes(state), about)

    def _stored(self, round_number: int, size: int) -> OuterState | None:
        """Return a stored state; None if there is none, or if it is broken or of another model."""
        try:
            head = head_of(self.reduce.store, self._state_key(round_number))
            if head is None:
                return None
            payload = payload_of(self.reduce.store, head, 4 * size * (1 + self.outer.slots))
            return state_of(round_number, payload, size, self.outer)
        except (CorruptObject, ValueError) as error:
            self.tell("common_weights_broken", f"{self.reduce.group}: {error}")
            return None

    def _stored_after(self, after: int, target: int, size: int) -> OuterState | None:
        """Return the newest intact state after a round up to `target`, or else the next one."""
        rounds = [one for one in self._numbers(self._states) if one > after]
        early = [one for one in reversed(rounds) if one <= target]
        for number in [*early, *(one for one in rounds if one > target)]:
            if (state := self._stored(number, size)) is not None:
                return state
        return None

    def _numbers(self, folder: str) -> list[int]:
        """Return the rounds that folders of the store are named by; other names are left out."""
        names = {
            key.removeprefix(folder).partition("/")[0] for key in self.reduce.store.keys(folder)
        }
        return sorted(one for name in names if (one := number_of(name, 8)) is not None)

    def _collect_garbage(self, last: int) -> None:
        """Remove states before the newest one up to `last`, and the contributions in them.

        Manifests stay, so that a late island can never close a round once more; so do the weights
        that all have started from, so that none starts the first round from others.
        """
        rounds = self._numbers(self._states)
        kept = max((one for one in rounds if one <= last), default=None)
        if kept is None:
            return
        group, store = self.reduce.group, self.reduce.store
        for number in [one for one in rounds if 0 < one < kept]:
            delete_folder(store, f"{self._states}{number:08d}/")
        folder, first = f"{group}/contributions/", kept - self.reduce.rules.max_staleness
        for base in [one for one in self._numbers(folder) if one < first]:
            delete_folder(store, f"{folder}{base:08d}/")
        self.reduce.forget(first)

    def _merged_after(self, step: str) -> int | None:
        found = decided(self.reduce.store, self._merge_key(step), is_value=_is_merge)
        return None if found is None else int(found["round"])

    def _note(self, step: str, merged: int) -> int:
        """Decide which round this run merges after a step; return the decided one."""
        key = self._merge_key(step)
        return int(decide(self.reduce.store, key, {"round": merged}, is_value=_is_merge)["round"])

    def _merge_key(self, step: str) -> str:
        return f"{self.reduce.group}/merges/{self.member}/{step}"

    def _state_key(self, round_number: int) -> str:
        return f"{self._states}{round_number:08d}/outer"

    def _count(self, base: int) -> None:
        """Count a merge, and tell of an own contribution that was not used in its round."""
        rounds = range(base + 1, self.round + 1)
        manifests = [one for one in map(self.reduce.manifest, rounds) if one is not None]
        self.counts.merged += 1
        if manifests:
            self.counts.contributors = len(manifests[-1].islands)
        for kind, why in self._unanswered.answered(manifests):
            self.counts.late += kind == "late"
            self.counts.dropped += kind == "dropped"
            self.counts.refused += kind == "refused"
            self.tell(f"contribution_{kind}", f"{self.reduce.group}: {why}")


def _is_merge(table: dict[str, Any]) -> bool:
    return type(table.get("round")) is int and table["round"] >= 0
