"""The phases of a round, as the folder of a store and a run directory show them from outside."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GROUP = "fragment-0000"
MOMENT_S = 0.002
JITTER_S = 0.03
PHASES = ("training", "sending", "waiting", "closing", "merging", "storing", "checkpoint")


@dataclass
class Watched:
    """One island's part of a store, and its run directory."""

    store: Path
    run: Path
    rank: int

    @property
    def newest(self) -> int:
        """The newest round that has a manifest."""
        rounds = self.store / GROUP / "rounds"
        return max((int(name.split(".")[0]) for name in _names(rounds)), default=0)

    def has_parts(self, base: int) -> bool:
        """Whether bytes of its contribution from a round are there."""
        return f"{self.rank:05d}.parts" in _names(self._contributions(base))

    def has_contributed(self, base: int) -> bool:
        """Whether its contribution from a round is complete."""
        return f"{self.rank:05d}.0" in _names(self._contributions(base))

    @property
    def merges(self) -> int:
        """How many merges it has noted."""
        member = self.run / ".island"
        if not member.exists():
            return 0
        name = member.read_text().strip()
        return len(_names(self.store / GROUP / "merges" / name))

    def has_state(self, number: int) -> bool:
        """Whether bytes of the common weights of a round are there."""
        return any(name.startswith("outer") for name in _names(self._states(number)))

    @property
    def drafts(self) -> int:
        """The highest step of a checkpoint that is written or begun; 0 for none."""
        found = (re.match(r"\.?step-(\d+)", name) for name in _names(self.run / "checkpoints"))
        return max((int(one[1]) for one in found if one), default=0)

    def _contributions(self, base: int) -> Path:
        return self.store / GROUP / "contributions" / f"{base:08d}"

    def _states(self, number: int) -> Path:
        return self.store / GROUP / "states" / f"{number:08d}"


def wait_for_moment(phase: str, victim: Watched, drawn: random.Random, until: float) -> str:
    """Wait for a random moment of a phase; return where the island then was.

    Raises TimeoutError at `until`, by the monotonic clock.
    """
    base = victim.newest
    merges, drafts = victim.merges, victim.drafts
    begins: dict[str, Callable[[], bool]] = {
        "training": lambda: True,
        "sending": lambda: victim.has_parts(victim.newest),
        "waiting": lambda: victim.has_contributed(victim.newest),
        "closing": lambda: victim.newest > base,
        "merging": lambda: victim.merges > merges,
        "storing": lambda: victim.newest > base and victim.has_state(victim.newest),
        "checkpoint": lambda: victim.merges > merges and victim.drafts > drafts,
    }
    if phase == "checkpoint":
        _wait(begins["merging"], until)
        drafts = victim.drafts
    _wait(begins[phase], until)
    time.sleep(drawn.uniform(0, 2.0 if phase == "training" else JITTER_S))
    return phase_of(victim, base, merges, drafts)


def phase_of(victim: Watched, base: int, merges: int, drafts: int) -> str:
    """Return the phase of a round from `base` on in which an island is."""
    if victim.drafts > drafts and victim.merges > merges:
        return "checkpoint"
    if victim.merges > merges:
        return "storing" if victim.has_state(victim.newest) else "merging"
    if victim.newest > base and victim.has_contributed(base):
        return "closing"
    now = victim.newest
    if victim.has_contributed(now):
        return "waiting"
    return "sending" if victim.has_parts(now) else "training"


def _wait(condition: Callable[[], bool], until: float) -> None:
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(MOMENT_S)


def _names(folder: Path) -> list[str]:
    try:
        return [one.name for one in folder.iterdir()]
    except FileNotFoundError:
        return []
