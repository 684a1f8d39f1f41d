"""Tables `[[tracking]]`: the experiment trackers that a run sends its figures to.

The run's own `metrics.jsonl` and `events.jsonl` are always written and need no table. Contains no
credentials: `token_env` and `headers_env` name environment variables.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from composer_mesh.configs import plugins
from composer_mesh.configs.base import (
    Count,
    CustomFunction,
    FilePath,
    FreeTable,
    Seconds,
    Section,
    by_type,
)

TrackerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s@]+$")]
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class TrackerSection(Section):
    """What every tracker has."""

    type: str
    """Type of the tracker."""

    name: TrackerName | None = None
    """Name of the tracker in events and of its folder in the run; its type by default."""

    queue: Count = 1000
    """Maximum number of steps that wait for a slow tracker; further ones are left out."""

    finish_s: Seconds = 5.0
    """Seconds that the end of the run waits for the tracker to take the remaining steps."""

    @property
    def title(self) -> str:
        """Its name in events."""
        return self.name or self.type


class TensorboardTracking(TrackerSection):
    """Event files of TensorBoard."""

    type: Literal["tensorboard"]
    """Type of the tracker."""

    folder: FilePath | None = None
    """Where the event files are written; trackers/NAME of the run by default."""


class WandbTracking(TrackerSection):
    """A run of Weights & Biases."""

    type: Literal["wandb"]
    """Type of the tracker."""

    project: TrackerName = "composer-mesh"
    """Project of the run."""

    entity: TrackerName | None = None
    """User or team; that of the API key by default."""

    group: TrackerName | None = None
    """Group of the run, for example of an ablation."""

    mode: Literal["online", "offline"] = "online"
    """"offline" writes files that `wandb sync` uploads later."""


class MlflowTracking(TrackerSection):
    """A run of MLflow."""

    type: Literal["mlflow"]
    """Type of the tracker."""

    uri: Annotated[str, Field(pattern=r"^(https?|sqlite|file)://?[^\s@]+$")] | None = None
    """Tracking URI of a server or a store; trackers/NAME/mlflow.db of the run by default."""

    experiment: TrackerName = "composer-mesh"
    """Experiment of the run."""


class TrackioTracking(TrackerSection):
    """A run of trackio, which keeps its data on this machine."""

    type: Literal["trackio"]
    """Type of the tracker."""

    project: TrackerName = "composer-mesh"
    """Project of the run."""

    folder: FilePath | None = None
    """Folder of trackio's databases (TRACKIO_DIR); trackio's own by default."""


class PrometheusTracking(TrackerSection):
    """An endpoint that a Prometheus server reads: the last value of each metric."""

    type: Literal["prometheus"]
    """Type of the tracker."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address to listen on; beyond loopback a token is required."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port to listen on; 0 takes a free one, which an event names."""

    token_env: Variable | None = None
    """Environment variable with the bearer token that readers must send."""

    def _problems(self) -> Iterator[str]:
        if self.host not in LOOPBACK and self.token_env is None:
            yield (
                f"host is {self.host!r}, which other machines reach, but token_env is not set: "
                "name the environment variable with the token that readers must send"
            )


class OpentelemetryTracking(TrackerSection):
    """A trace for each step, with a span for each part of it, sent by OTLP over HTTP."""

    type: Literal["opentelemetry"]
    """Type of the tracker."""

    endpoint: Url = "http://127.0.0.1:4318/v1/traces"
    """Address of a collector."""

    headers_env: Variable | None = None
    """Environment variable with headers for the collector, as NAME=VALUE with commas between."""

    service_name: TrackerName = "composer-mesh"
    """The attribute service.name of the spans."""


class CustomTracking(TrackerSection, CustomFunction):
    """A tracker of your own: a class with the methods of `composer_mesh.Tracker`."""

    type: Literal["custom"]
    """Type of the tracker."""


class RegisteredTracking(TrackerSection):
    """A tracker that another package registers, as the page "Plugins" describes."""

    type: Annotated[str, plugins.registered("trackers")]
    """Type of the tracker: the name that the package registers."""

    kwargs: FreeTable = Field(default_factory=dict)
    """Keyword arguments of its class."""

    @property
    def import_path(self) -> str:
        """Its class, as `module:object`."""
        return plugins.require("trackers", self.type)


def _tag(table: Any) -> str | None:
    """Return a table's `type`, or "registered" for one that another package registers."""
    tag = by_type("")(table)
    ours = tag is None or tag in plugins.own("trackers")
    return tag if ours or plugins.find("trackers", str(tag)) is None else "registered"


TrackingConfig = Annotated[
    Annotated[TensorboardTracking, Tag("tensorboard")]
    | Annotated[WandbTracking, Tag("wandb")]
    | Annotated[MlflowTracking, Tag("mlflow")]
    | Annotated[TrackioTracking, Tag("trackio")]
    | Annotated[PrometheusTracking, Tag("prometheus")]
    | Annotated[OpentelemetryTracking, Tag("opentelemetry")]
    | Annotated[CustomTracking, Tag("custom")]
    | Annotated[RegisteredTracking, Tag("registered")],
    Discriminator(_tag),
]
