"""The phase of a round that an island is in, as the folder of the store and its run show it."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

GROUP = "fragment-0000"
MOMENT_S = 0.001
AT_RANDOM_S = 2.0
PATIENCE_S = 60.0
PHASES = ("training", "sending", "waiting", "closing", "storing", "merging", "checkpoint")
"""sending: bytes of its contribution are there, and the contribution is not; waiting: it is, and
no manifest; closing: the manifest is, and its merge is not noted; storing: bytes of the common
weights are there, and they are not; merging: no checkpoint has the merge; checkpoint: it is being
written."""


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

    @property
    def phase(self) -> str:
        """The phase that it is in now."""
        newest = self.newest
        sent = _names(self.store / GROUP / "contributions" / f"{newest:08d}")
        if f"{self.rank:05d}.0" in sent:
            return "waiting"
        if f"{self.rank:05d}.parts" in sent:
            return "sending"
        step, merged = self._last_merge()
        if merged < newest:
            return "closing"
        states = _names(self.store / GROUP / "states" / f"{newest:08d}")
        if "outer.parts" in states and "outer.0" not in states:
            return "storing"
        checkpoints = _names(self.run / "checkpoints")
        if any(name.startswith(f".step-{step}.") for name in checkpoints):
            return "checkpoint"
        whole = (re.fullmatch(r"step-(\d+)", name) for name in checkpoints)
        is_kept = any(int(one[1]) >= step for one in whole if one)
        return "training" if is_kept else "merging"

    def _last_merge(self) -> tuple[int, int]:
        """Return the step and the round of its last merge; zeros before the first."""
        member = self.run / ".island"
        if not member.exists():
            return 0, 0
        folder = self.store / GROUP / "merges" / member.read_text().strip()
        steps = {int(re.split(r"[.-]", name)[0]): name for name in _names(folder)}
        if not steps:
            return 0, 0
        last = max(steps)
        _, _, body = (folder / steps[last]).read_bytes().partition(b"\n")
        return last, int(json.loads(body)["round"]) if body else 0


def wait_for_moment(
    phase: str, victim: Watched, drawn: random.Random, patience_s: float = PATIENCE_S
) -> str:
    """Wait for a random time, and then until an island is in a phase; return the one it is in.

    After `patience_s` it is any: some last for a millisecond.
    """
    time.sleep(drawn.uniform(0, min(AT_RANDOM_S, patience_s)))
    until = time.monotonic() + patience_s
    while (now := victim.phase) != phase and time.monotonic() < until:
        time.sleep(MOMENT_S)
    return now


def _names(folder: Path) -> list[str]:
    try:
        return [one.name for one in folder.iterdir()]
    except FileNotFoundError:
        return []
