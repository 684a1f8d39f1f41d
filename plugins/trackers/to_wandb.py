"""Weights & Biases, online or as offline files. A resumed run continues under the same id."""

from __future__ import annotations

import secrets
from typing import Any

import wandb

from composer_mesh.configs.tracking import WandbTracking
from composer_mesh.plugins.trackers.kept_id import keep_id, kept_id
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

EXIT_CODES = {"failed": 1, "stopped": 130}


class WandbTracker:
    """One run of W&B; the API key is found as W&B finds it."""

    def __init__(self, section: WandbTracking) -> None:
        self._section = section
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        section = self._section
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            name=run.name,
            id=kept_id(run.folder) or keep_id(run.folder, secrets.token_hex(8)),
            resume="allow",
            mode=section.mode,
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self._run.url or f"wandb sync {run.folder}/wandb/offline-run-*")

    def log(self, step: TrackedStep) -> None:
        self._run.log(dict(step.values), step=step.step)

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=EXIT_CODES.get(state, 0))
