"""Handling of actors that die or hang, of inputs that fail repeatedly, and of slow functions."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import Seconds, Section


class SupervisionConfig(Section):
    """Restart budget and retries; a replica that exceeds its budget is given up with an event."""

    heartbeat_s: Seconds = 5.0
    """Seconds without a message from an actor after which it is pinged."""

    hang_s: Seconds = 30.0
    """Seconds without an answer after which an actor counts as hung and is killed."""

    restarts: Annotated[int, Field(ge=0, le=1000)] = 5
    """Maximum restarts of one replica within window_s; then it is given up."""

    window_s: Seconds = 300.0
    """Seconds over which restarts are counted."""

    backoff_s: Seconds = 0.5
    """Seconds before the first restart of a replica; doubles with each one in the window."""

    backoff_max_s: Seconds = 15.0
    """Maximum seconds before a restart."""

    rollout_retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Number of times to retry a failed rollout, with a fresh environment."""

    poison_after: Annotated[int, Field(ge=2, le=1000)] = 2
    """Number of equal errors of one episode after which it is quarantined."""

    trainer_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Maximum restarts of the trainer from a checkpoint in a run."""

    custom_function_s: Seconds = 60.0
    """Seconds that one call of a custom loss or advantage may take; a longer one ends the run."""

    def _problems(self) -> Iterator[str]:
        if self.hang_s < self.heartbeat_s:
            yield (
                f"hang_s is {self.hang_s} but heartbeat_s is {self.heartbeat_s}, so a silence "
                "could not be noticed in time: raise hang_s or lower heartbeat_s"
            )
        if self.backoff_max_s < self.backoff_s:
            yield (
                f"backoff_max_s is {self.backoff_max_s} but backoff_s is {self.backoff_s}: raise "
                "backoff_max_s"
            )
