"""What the driver says of a finished episode, and what it means here. Pure.

An episode that did not finish has no reward: its error is infrastructure or data, by the class that
verifiers gave it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.tasks.errors import TaskError

INFRASTRUCTURE = frozenset(
    {"InterceptionError", "ProviderError", "SandboxError", "ToolsetError", "TunnelError"}
)
"""Error classes of verifiers that say nothing about the task, its code or what was sampled."""
PASSING = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed."""


class EpisodeFailed(TaskError):
    """An episode of verifiers failed by its task, its harness or what the policy did."""


class EpisodeLost(TaskError):
    """An episode of verifiers failed by a process, a sandbox or a connection."""

    failure_class = "infrastructure"


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DriverError(_Said):
    """An error as verifiers recorded it."""

    type: str
    message: str
    status_code: int | None = None

    @property
    def is_infrastructure(self) -> bool:
        """Whether the same episode may succeed elsewhere or later."""
        refused = self.status_code is not None and 400 <= self.status_code < 500
        return self.type in INFRASTRUCTURE and (not refused or self.status_code in PASSING)


class DriverTrace(_Said):
    """One agent's run; its requests had the header X-Session-ID `session`."""

    session: str = Field(min_length=1)
    agent: str
    trainable: bool
    ok: bool
    reward: float
    rewards: dict[str, float | None]
    metrics: dict[str, float | None]
    stop: str | None

    def values(self) -> dict[str, float]:
        """Return the unweighted rewards and, as `metric/NAME`, the metrics; raise EpisodeFailed."""
        missing = [name for name, value in self.rewards.items() if value is None]
        if missing:
            raise EpisodeFailed(
                f"rewards {', '.join(missing)} of agent {self.agent} were not computed: it stopped "
                f"by {self.stop}"
            )
        found = {**self.rewards, **{f"metric/{name}": v for name, v in self.metrics.items()}}
        return {name: value for name, value in found.items() if value is not None}


class DriverEpisode(_Said):
    """An episode; `complete` is the environment's own verdict."""

    complete: bool
    errors: list[DriverError]
    traces: list[DriverTrace]

    def scored(self) -> list[DriverTrace]:
        """Return the finished runs of trained agents; raise EpisodeLost or EpisodeFailed."""
        if not self.complete:
            raise failure(self.errors)
        found = [trace for trace in self.traces if trace.ok and trace.trainable]
        if not found:
            raise EpisodeFailed("the episode finished without a run of an agent that is trained")
        return found


def failure(errors: list[DriverError]) -> EpisodeFailed | EpisodeLost:
    """Return the error of an episode; one error of infrastructure makes it that."""
    first = next((one for one in errors if one.is_infrastructure), None)
    if first is not None:
        return EpisodeLost(_text(first))
    if not errors:
        return EpisodeFailed("the environment says that the episode is not complete, and not why")
    return EpisodeFailed(_text(errors[-1]))


def _text(error: DriverError) -> str:
    status = "" if error.status_code is None else f" (status {error.status_code})"
    return f"verifiers: {error.type}{status}: {error.message}"
