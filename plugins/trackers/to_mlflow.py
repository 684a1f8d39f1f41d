"""MLflow: a run of a server, or of a SQLite file in the run's directory; resumed under its id."""

from __future__ import annotations

import logging
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from composer_mesh.configs.changes import flat
from composer_mesh.configs.tracking import MlflowTracking
from composer_mesh.plugins.trackers.kept_id import keep_id, kept_id
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
LONGEST_PARAMETER = 500
AT_ONCE = 100
"""Parameters of one request, as many as MLflow takes."""


class MlflowTracker:
    """One run of MLflow, through its client."""

    def __init__(self, section: MlflowTracking) -> None:
        self._section = section
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports each table that it makes
        run.folder.mkdir(parents=True, exist_ok=True)
        uri = self._section.uri or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._run_id = kept_id(run.folder) or self._created(run)
        self._client.update_run(self._run_id, status="RUNNING")
        return f"mlflow server --backend-store-uri {uri}" if uri.startswith("sqlite") else uri

    def _created(self, run: TrackedRun) -> str:
        name = self._section.experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, value[:LONGEST_PARAMETER]) for key, value in flat(run.config)]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(run_id, params=params[first : first + AT_ONCE])
        return keep_id(run.folder, run_id)

    def log(self, step: TrackedStep) -> None:
        at = int(step.at * 1000)
        metrics = [Metric(name, value, at, step.step) for name, value in step.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, state: str) -> None:
        self._client.set_terminated(self._run_id, status=STATES.get(state, "FINISHED"))
