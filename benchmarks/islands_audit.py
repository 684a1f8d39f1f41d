"""Audit of an object store after a run: recomputes every average, without the islands' own code.

The mean of a round is summed here in float64 from the contributions that its manifest names, and
the outer optimizer is SGD, written out. Needs a run that has removed nothing (`rounds_kept`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

from composer_mesh.plugins.islands.store.opening import ObjectStore

TOLERANCE = 1e-5


@dataclass
class Outcome:
    """What became of islands under faults."""

    hangs: int = 0
    kills: int = 0
    rounds: int = 0
    lost: int = 0
    """Rounds that an island could not merge."""
    wrong: list[str] = field(default_factory=list)


@dataclass
class Audit:
    """The rounds of a store, the weights after each of them, and what is wrong."""

    rounds: int = 0
    wrong: list[str] = field(default_factory=list)
    islands: dict[int, set[int]] = field(default_factory=dict)
    weights: dict[int, np.ndarray] = field(default_factory=dict)


def audit(store: ObjectStore, group: str, lr: float = 1.0, momentum: float = 0.0) -> Audit:
    """Compute all rounds of a group of plain float32 contributions; compare the stored states."""
    found = Audit()
    weights, velocity = _state(store, group, 0, momentum)
    found.weights[0] = weights
    used: set[tuple[int, int]] = set()
    while (manifest := _register(store, f"{group}/rounds/{found.rounds + 1:08d}")) is not None:
        found.rounds += 1
        names = {(base, island) for base, island in manifest["contributions"]}
        if not names or names & used:
            found.wrong.append(f"round {found.rounds} uses {sorted(names & used)} twice, or none")
        used |= names
        total = np.zeros(weights.size)
        for base, island in sorted(names):
            try:
                total += _contribution(store, group, base, island)
            except ValueError as error:
                found.wrong.append(f"round {found.rounds} averages a broken part: {error}")
        mean = total / len({island for _, island in names})
        if not np.isfinite(mean).all():
            found.wrong.append(f"round {found.rounds} averages values like NaN")
        velocity = momentum * velocity + mean
        weights = weights - lr * (mean + momentum * velocity if momentum else mean)
        found.weights[found.rounds] = weights
        found.islands[found.rounds] = {island for _, island in names}
        _compare(store, group, found, momentum)
    return found


def _compare(store: ObjectStore, group: str, found: Audit, momentum: float) -> None:
    try:
        stored, _ = _state(store, group, found.rounds, momentum)
    except LookupError:
        return  # the island that closed it died before it wrote the state
    apart = float(np.abs(stored - found.weights[found.rounds]).max())
    if not apart <= TOLERANCE:
        found.wrong.append(f"the state of round {found.rounds} is {apart:g} off")


def _state(
    store: ObjectStore, group: str, number: int, momentum: float
) -> tuple[np.ndarray, np.ndarray]:
    head = _register(store, f"{group}/states/{number:08d}/outer")
    if head is None:
        raise LookupError(number)
    flat = np.frombuffer(_payload(store, head), "<f4").astype(np.float64)
    if not momentum:
        return flat, np.zeros_like(flat)
    weights, velocity = np.split(flat, 2)
    return weights, velocity


def _contribution(store: ObjectStore, group: str, base: int, island: int) -> np.ndarray:
    head = _register(store, f"{group}/contributions/{base:08d}/{island:05d}")
    assert head is not None, f"the contribution of island {island} from round {base} is gone"
    return np.frombuffer(_payload(store, head), "<f4").astype(np.float64)


def _payload(store: ObjectStore, head: dict) -> bytes:
    return b"".join(store.get(name) or b"" for name, _, _ in head["parts"])


def _register(store: ObjectStore, key: str) -> dict | None:
    """Return the first intact value of a register, by its definition in `store/blobs.py`."""
    attempt = 0
    while (data := store.get(f"{key}.{attempt}")) is not None:
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == digest:
            return dict(json.loads(body))
        attempt += 1
    return None
