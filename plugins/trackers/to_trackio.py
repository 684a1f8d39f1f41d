"""trackio: a run in its local database; nothing leaves the machine."""

from __future__ import annotations

import os
from typing import Any

from composer_mesh.configs.tracking import TrackioTracking
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep


class TrackioTracker:
    """One run of trackio, which continues under its name when the run is resumed."""

    def __init__(self, section: TrackioTracking) -> None:
        if section.folder is not None:
            os.environ["TRACKIO_DIR"] = str(section.folder.absolute())  # read when it is imported
        import trackio

        self._trackio, self._project = trackio, section.project
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        self._run = self._trackio.init(
            project=self._project,
            name=run.name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return f"trackio show --project {self._project}"

    def log(self, step: TrackedStep) -> None:
        self._run.log(dict(step.values), step=step.step)

    def finish(self, state: str) -> None:  # noqa: ARG002  trackio has no state of a run
        self._run.finish()
