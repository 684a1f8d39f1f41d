"""One island by torchft as a process of its own: a quadratic, with a checkpoint after each step.

Prints the weights that a step ends with, and then what merged after it, as JSON. It waits for a
line on stdin after the `--hold`-th round in a row with another island, and ends after the
`--joint`-th one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from islands_worker import read_checkpoint, write_checkpoint
from islands_world import SIZES, Checkpoint, FlatWeights

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.managed_island import ManagedIsland

MOST_STEPS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--joint", type=int, required=True)
    arguments = parser.parse_args()
    config = IslandsConfig.model_validate(arguments.config)
    file = arguments.folder / f"{config.rank}.npz"
    weights, joint = FlatWeights(), 0
    island = ManagedIsland(config, MOST_STEPS, weights)
    step = restored(island, weights, file)
    while joint < arguments.joint:
        if joint and joint == arguments.hold:
            sys.stdin.readline()
        for name, value in weights.of.items():
            drawn = np.linspace(-1, 1, SIZES[name]).astype(np.float32) * (config.rank + 1)
            weights.of[name] = (value - np.float32(0.1) * (value - drawn)).astype(np.float32)
        step += 1
        tell({"began": weights.read(list(SIZES)).tolist()})
        figures = island.after_step(step)
        if figures["islands/merged"]:
            joint = joint + 1 if figures["islands/contributors"] == 2 else 0
        kept = {name: one.copy() for name, one in island.kept().items()}
        write_checkpoint(file, Checkpoint(step, dict(weights.of), kept))
        tell(
            {
                "step": step,
                "weights": weights.read(list(SIZES)).tolist(),
                "common": hashlib.sha256(kept["common"].tobytes()).hexdigest(),
                "figures": figures,
                "events": island.new_events(),
            }
        )
    island.finish()


def tell(about: dict[str, Any]) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()


def restored(island: ManagedIsland, weights: FlatWeights, file: Path) -> int:
    """Start an island or restore it from its checkpoint; return the step."""
    found = read_checkpoint(file)
    if found is None:
        island.join()
        return 0
    weights.of = {name: one.copy() for name, one in found.weights.items()}
    island.restore(found.step, found.kept)
    return found.step


if __name__ == "__main__":
    main()
