"""In which phase of a round an island is killed, as its store and its run directory show it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from islands_moments import GROUP, PHASES, Watched, wait_for_moment

from composer_mesh.plugins.islands.store.blobs import seal

MEMBER = "0123456789abcdef"


class Round:
    """Round 5 of island 1, which begins after step 8, as it goes on in files."""

    def __init__(self, folder: Path) -> None:
        self.store, self.run = folder / "store", folder / "run"
        (self.run / "checkpoints").mkdir(parents=True)
        (self.run / ".island").write_text(f"{MEMBER}\n")
        self.closed(4)
        self.merged(8, 4)
        (self.run / "checkpoints" / "step-8").mkdir()

    def put(self, key: str, data: bytes = b"") -> None:
        path = self.store / GROUP / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def closed(self, number: int) -> None:
        self.put(f"rounds/{number:08d}.0")

    def merged(self, step: int, number: int) -> None:
        self.put(f"merges/{MEMBER}/{step}.0", seal({"round": number}))

    def reach(self, phase: str) -> None:
        """Write what there is in a phase, and in those before it."""
        for one in PHASES[: PHASES.index(phase) + 1]:
            if one == "sending":
                self.put("contributions/00000004/00001.parts/0")
            elif one == "waiting":
                self.put("contributions/00000004/00001.0")
            elif one == "closing":
                self.closed(5)
            elif one == "storing":
                self.merged(10, 5)
                self.put("states/00000005/outer.parts/0")
            elif one == "merging":
                self.put("states/00000005/outer.0")
            elif one == "checkpoint":
                (self.run / "checkpoints" / ".step-10.7-1").mkdir()


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_of_a_round_is_told_from_the_others(phase: str, tmp_path: Path) -> None:
    there = Round(tmp_path)
    there.reach(phase)
    assert Watched(there.store, there.run, 1).phase == phase


def test_a_round_whose_merge_has_a_checkpoint_is_over(tmp_path: Path) -> None:
    there = Round(tmp_path)
    there.reach("checkpoint")
    (there.run / "checkpoints" / ".step-10.7-1").rename(there.run / "checkpoints" / "step-10")
    assert Watched(there.store, there.run, 1).phase == "training"


def test_the_moment_after_all_patience_is_that_of_any_phase(tmp_path: Path) -> None:
    there = Round(tmp_path)
    there.reach("waiting")
    watched = Watched(there.store, there.run, 1)
    assert wait_for_moment("waiting", watched, random.Random(1), 0.01) == "waiting"
    assert wait_for_moment("storing", watched, random.Random(1), 0.01) == "waiting"
