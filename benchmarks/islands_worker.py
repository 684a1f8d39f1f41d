"""One island as a process of its own: a quadratic, trained by the core of `plugins.islands`.

Its arguments say what to do. Its checkpoint is a file, so that it may be killed at any moment
and started again. Prints each step as JSON: its number, figures and weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from islands_world import Checkpoint, Run, island_config

from composer_mesh.plugins.islands.store.opening import open_store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("rank", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--config", type=json.loads, default={})
    arguments = parser.parse_args()
    config = island_config(
        arguments.rank, arguments.count, store=arguments.store, **arguments.config
    )
    run = Run(arguments.rank, config, open_store(arguments.store), arguments.steps)
    file = arguments.folder / f"{arguments.rank}.npz"
    run.checkpoint = read_checkpoint(file)
    run.open()
    while run.step < run.steps:
        time.sleep(arguments.step_s)
        run.train()
        assert run.checkpoint is not None
        print_step(
            run
        )  # before the checkpoint: a step that a kill cuts in between is printed again
        write_checkpoint(file, run.checkpoint)
    assert run.island is not None
    run.island.finish()


def print_step(run: Run) -> None:
    """Print what this step did."""
    about = {"step": run.step, "weights": run.flat.tolist(), "figures": run.figures[-1]}
    print(json.dumps(about), flush=True)


def write_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    draft = file.with_suffix(".draft")
    with draft.open("wb") as out:
        weights = {f"w.{name}": one for name, one in checkpoint.weights.items()}
        kept = {f"k.{name}": one for name, one in checkpoint.kept.items()}
        np.savez(out, allow_pickle=False, step=np.array(checkpoint.step), **weights, **kept)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)


def read_checkpoint(file: Path) -> Checkpoint | None:
    """Return the checkpoint of a file; None if there is none."""
    if not file.exists():
        return None
    with np.load(file) as found:
        parts = {name: found[name] for name in found.files}
    weights = {n.removeprefix("w."): one for n, one in parts.items() if n.startswith("w.")}
    kept = {n.removeprefix("k."): one for n, one in parts.items() if n.startswith("k.")}
    return Checkpoint(int(parts["step"]), weights, kept)


if __name__ == "__main__":
    main()
