"""The port to what starts islands, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.islands.store.opening import ObjectStore
from composer_mesh.services.directory.status import EVENTS_FILE
from composer_mesh.services.inspection.events_command import event_of

State = Literal["waiting", "running", "finished", "stopped", "failed"]
ENDED: frozenset[State] = frozenset({"finished", "stopped", "failed"})


@dataclass(frozen=True)
class IslandReplica:
    """One island to start: its resolved config and its run directory, an absolute path."""

    rank: int
    config: Config
    output: Path
    resume: bool = False


@dataclass(frozen=True)
class IslandState:
    """An island's state now; `step` is its trained steps.

    `cause` is why it failed, or why its records are not read.
    """

    rank: int
    state: State
    step: int = 0
    cause: str = ""

    @property
    def ended(self) -> bool:
        """Whether the island does nothing any more."""
        return self.state in ENDED


class Executor(ABC):
    """Starts islands somewhere and tells what becomes of them."""

    @abstractmethod
    def dry_run(self, replicas: Sequence[IslandReplica]) -> None:
        """Print every file, command and call; ask and change nothing."""

    @abstractmethod
    def connect(self, store: ObjectStore | None) -> None:
        """Check what it needs, such as an account; raises `LaunchFailed`.

        `store` is where the islands meet, if they do not meet by a lighthouse.
        """

    @abstractmethod
    def launch_replicas(self, replicas: Sequence[IslandReplica]) -> None:
        """Start the islands. Waits until each is accepted; ends the others if one is not."""

    @abstractmethod
    def poll(self) -> list[IslandState]:
        """Return the state of each island, by rank."""

    @abstractmethod
    def cancel(self, grace_s: float) -> None:
        """End the islands, after `grace_s` for a checkpoint. Waits for their end."""


def failure_of(output: Path) -> str:
    """Return what a run recorded as the cause of its failure; "" if nothing."""
    events = output / EVENTS_FILE
    lines = events.read_text(errors="replace").splitlines() if events.is_file() else []
    parsed = (event_of(line) for line in reversed(lines))
    failed = next((event for event in parsed if event and event.get("event") == "run_failed"), None)
    return str(failed["detail"]) if failed is not None and failed.get("detail") else ""
