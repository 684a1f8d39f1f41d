"""Three islands over a store that fails as clouds do, in threads, with kills and wrong clocks.

Each world is drawn by its seed: which operations are refused, lose their answer or are torn, which
listings are late, at which operation an island is killed, who is ten times slower, whose clock runs
how fast, and whose weights become NaN. Time runs 20 times faster than on the wall.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from islands_audit import TOLERANCE, Audit, Outcome, audit
from islands_stores import Faults, FaultyStore, KilledError, MemoryStore
from islands_world import Run, island_config

from composer_mesh.plugins.islands.rounds.all_reduce import Clock

FASTER = 20
HANG_S = 60.0
ISLANDS, STEPS = 3, 16


@dataclass
class World(Outcome):
    """What became of a world."""

    seed: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    new_events: Counter[str] = field(default_factory=Counter)


def faulty_world(seed: int) -> World:
    """Live one world; return what became of it, with every average computed again."""
    drawn, outcome, store = random.Random(seed), World(seed=seed), MemoryStore()
    slow, nan = drawn.randrange(ISLANDS), drawn.randrange(2 * ISLANDS)
    islands = [_Island(rank, seed, store, rank == slow, rank == nan) for rank in range(ISLANDS)]
    threads = [threading.Thread(target=one.live, daemon=True) for one in islands]
    for thread in threads:
        thread.start()
    until = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    outcome.hangs = sum(thread.is_alive() for thread in threads)
    found = audit(store, "fragment-0000")
    outcome.rounds, outcome.wrong = found.rounds, found.wrong
    for one in islands:
        one.tell(outcome, found)
    return outcome


class _Island:
    """One island's process, which may be killed and is then started again."""

    def __init__(self, rank: int, seed: int, store: MemoryStore, slow: bool, nan: bool) -> None:
        self._drawn = random.Random(1000 * seed + rank)
        self._store, self._slow, self._nan = store, slow, nan
        self._faults = Faults(
            refused=0.05, lost_answer=0.05, torn=0.03, torn_silently=0.01, stale_listing=0.2
        )
        self._rank, self._kills, self._errors = rank, 0, list[str]()
        self._merged: list[tuple[int, np.ndarray]] = []
        config = island_config(
            rank, ISLANDS, steps_per_round=2, deadline_s=10.0, request_s=5.0, rounds_kept=10**6
        )
        rate, start = self._drawn.choice((0.2, 1.0, 5.0)), self._drawn.uniform(-1e9, 1e9)
        clock = Clock(
            lambda: start + rate * FASTER * time.monotonic(),
            lambda seconds: time.sleep(seconds / FASTER),
        )
        self._run = Run(rank, config, store, STEPS, clock=clock)

    def live(self) -> None:
        """Train to the end, however often the process is killed or refused."""
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            try:
                self._start()
                return
            except KilledError:
                self._kills += 1
            except Exception as error:  # noqa: BLE001  a process that fails is started again
                self._errors.append(f"{type(error).__name__}: {error}")

    def _start(self) -> None:
        seed = self._drawn.randrange(10**9)
        mortal = self._drawn.random() < 0.5 and self._kills < 3
        operations = self._drawn.randrange(20, 200) if mortal else math.inf
        self._run.store = FaultyStore(self._store, self._faults, seed, operations)
        self._run.open()
        while self._run.step < STEPS:
            time.sleep((0.1 if self._slow else 0.01) * 10 / FASTER)
            if self._nan and self._run.step == 5:
                self._run.weights.of["a"][0] = np.nan
            self._run.train()
            figures = self._run.figures[-1]
            if figures["islands/merged"]:
                self._merged.append((int(figures["islands/round"]), self._run.flat))
        assert self._run.island is not None
        self._run.island.finish()

    def tell(self, outcome: World, found: Audit) -> None:
        """Add what happened here, and compare what was merged with the audit."""
        outcome.kills += self._kills
        outcome.lost += sum(int(one["islands/lost"]) for one in self._run.figures)
        outcome.new_events.update(kind for kind, _ in self._run.new_events)
        outcome.new_events.update(text[:60] for text in self._errors)
        outcome.happened += self._faults.happened
        for number, weights in self._merged:
            expected = found.weights.get(number)
            apart = np.inf if expected is None else float(np.abs(weights - expected).max())
            if not apart <= TOLERANCE:
                outcome.wrong.append(f"island {self._rank} is {apart:g} off after round {number}")
