"""What a supervised run leaves in its directory: its config, its store and checkpoints."""

from __future__ import annotations

from pathlib import Path

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.actors.checkpoints.manifest import written
from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.sft.config import sft_config


def checkpoint(run: Path, step: int, weights: str = "weights") -> Path:
    """Write a checkpoint as a run does."""
    run.mkdir(parents=True, exist_ok=True)
    draft = CheckpointDraft(run.absolute(), step)
    for name in ("config.json", "model.safetensors"):
        (draft.folder / name).write_text(weights)
    return draft.commit(written(draft.folder, draft.folder.iterdir())).folder


def supervised(config: Config, run: Path, *steps: int) -> Path:
    """Write what a supervised run leaves."""
    run.mkdir(parents=True)
    (run / STORE_FILE).touch()
    (run / "config.toml").write_text(dump_toml(sft_config(config)))
    for step in steps:
        checkpoint(run, step)
    return run
