"""Experiment trackers with packages of their own, each imported when its tracker is made.

TensorBoard: event files by its own writer, without torch and TensorFlow. MLflow: a run of a server,
or of a SQLite file in the run's directory; resumed under its id. Weights & Biases, online or as
offline files; a resumed run continues under the same id. trackio: a run in its local database;
nothing leaves the machine.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from composer_mesh.configs.changes import flat
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.tracking import (
    MlflowTracking,
    TensorboardTracking,
    TrackioTracking,
    WandbTracking,
)
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

ID_FILE = "id"
LONGEST = 200
FLUSH_S = 5
MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
LONGEST_PARAMETER = 500
AT_ONCE = 100
"""Parameters of one request, as many as MLflow takes."""
WANDB_EXIT_CODES = {"failed": 1, "stopped": 130}


def kept_id(folder: Path) -> str:
    """Return the id that a resumed run has in a tracker, kept in its folder; empty without one."""
    try:
        return read_regular(folder / ID_FILE, LONGEST).decode().strip()
    except FileNotFoundError:
        return ""


def keep_id(folder: Path, identity: str) -> str:
    """Write an id into a tracker's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with OpenFolder(folder) as opened:
        opened.write_whole(ID_FILE, f"{identity}\n".encode())
    return identity


class TensorboardTracker:
    """Writes an event file for each process of the run, all in one folder."""

    def __init__(self, section: TensorboardTracking) -> None:
        self._folder: Path | None = section.folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder if self._folder is None else self._folder / run.name
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        return f"tensorboard --logdir {folder}"

    def log(self, step: TrackedStep) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()
        ]
        event = Event(step=step.step, wall_time=step.at, summary=Summary(value=values))
        self._writer.add_event(event)

    def finish(self, state: str) -> None:  # noqa: ARG002  event files have no state
        self._writer.close()


class MlflowTracker:
    """One run of MLflow, through its client."""

    def __init__(self, section: MlflowTracking) -> None:
        self._section = section
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports each table that it makes
        run.folder.mkdir(parents=True, exist_ok=True)
        uri = self._section.uri or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._run_id = kept_id(run.folder) or self._created(run)
        self._client.update_run(self._run_id, status="RUNNING")
        return f"mlflow server --backend-store-uri {uri}" if uri.startswith("sqlite") else uri

    def _created(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        name = self._section.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, value[:LONGEST_PARAMETER]) for key, value in flat(run.config)]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(run_id, params=params[first : first + AT_ONCE])
        return keep_id(run.folder, run_id)

    def log(self, step: TrackedStep) -> None:
        from mlflow.entities import Metric

        at = int(step.at * 1000)
        metrics = [Metric(name, value, at, step.step) for name, value in step.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, state: str) -> None:
        self._client.set_terminated(self._run_id, status=MLFLOW_STATES.get(state, "FINISHED"))


class WandbTracker:
    """One run of W&B; the API key is found as W&B finds it."""

    def __init__(self, section: WandbTracking) -> None:
        self._section = section
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        import wandb

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
        self._run.finish(exit_code=WANDB_EXIT_CODES.get(state, 0))


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
