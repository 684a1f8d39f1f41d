"""Broken and hostile checkpoints: one error each, nothing hangs, nothing is run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from broken_files import Breaker, watched

from composer_mesh.actors.checkpoints.folder import (
    CheckpointDraft,
    UnreadableCheckpoint,
    newest_whole,
)
from composer_mesh.actors.checkpoints.manifest import damage, write_manifest, written
from composer_mesh.actors.checkpoints.state import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointReader,
    CheckpointWriter,
    TrainingState,
    random_states,
    reading,
    restore_random_states,
)
from composer_mesh.actors.checkpoints.teacher_average import (
    AVERAGE_FILE,
    read_average,
    write_average,
)
from composer_mesh.actors.models.optimizer_state import StateOfOtherWeights, check_weights
from composer_mesh.actors.models.ranks import CPU, Ranks

REFUSED = (UnreadableCheckpoint, StateOfOtherWeights)
WEIGHT = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5), "none": torch.zeros(0, 2)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    tensors = {WEIGHTS + name: one for name, one in WEIGHT.items()}
    tensors[OPTIMIZER + "a/step"] = torch.tensor(3.0)
    figures = {"taid": {"t": 0.4}, "trained": ["a", "b"]}
    writer = CheckpointWriter(Ranks(), None)
    writer.copy(TrainingState(3, tensors, figures, [random_states(CPU)]))
    draft = CheckpointDraft(root, 3)
    files = [*writer.write(draft.folder, export=False), *write_average(draft.folder, WEIGHT)]
    draft.commit(files)
    return root


def resume(root: Path) -> str:
    """Do to the newest checkpoint what a resume does; returns how it went."""
    found, aside = newest_whole(root)
    if found is None:
        return "damaged" if aside else "gone"
    reader = CheckpointReader(found.folder)
    tensors = {name: torch.zeros_like(one) for name, one in WEIGHT.items()}
    reader.of(WEIGHTS).read(tensors)
    reader.of(OPTIMIZER).read({"a/step": torch.zeros(())})
    with reading(found.folder):
        restore_random_states(reader.rng[0], CPU)
    average = read_average(found.folder / AVERAGE_FILE)
    check_weights(tensors, average.shapes())
    average.read(tensors)
    return "resumed"


def manifest_again(folder: Path) -> None:
    """Write the manifest of what is there now, as whoever plants a checkpoint would."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    write_manifest(folder, 3, written(folder, [path for path in files if not path.is_symlink()]))


def test_no_broken_checkpoint_raises_hangs_or_runs_code(
    whole: Path, tmp_path: Path, cases: Callable[[int], Iterator[int]]
) -> None:
    outcomes: dict[str, int] = {}
    marker = tmp_path / "attacked"
    for seed in cases(300):
        rng, root = random.Random(seed), tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        checkpoint = root / "checkpoints" / "step-3"
        for _ in range(rng.randint(1, 3)):
            Breaker(rng, marker).break_one(checkpoint)
        if rng.random() < 0.7 and (checkpoint / "manifest.json").is_file():
            manifest_again(checkpoint)
        with watched() as run:
            damage(checkpoint)
            try:
                outcome = resume(root)
            except REFUSED as error:
                outcome = type(error).__name__
        assert not run, (seed, run)
        assert not marker.exists(), seed
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["UnreadableCheckpoint"] > 20, outcomes
    assert outcomes["damaged"] > 20, outcomes
