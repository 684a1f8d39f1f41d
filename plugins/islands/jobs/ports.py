"""The port to what starts islands, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.islands.store.port import ObjectStore

State = Literal["waiting", "running", "finished", "stopped", "failed"]
ENDED: frozenset[State] = frozenset({"finished", "stopped", "failed"})


@dataclass(frozen=True)
class Replica:
    """One island to start: its resolved config and its run directory, an absolute path."""

    rank: int
    config: Config
    output: Path
    resume: bool = False


@dataclass(frozen=True)
class ReplicaState:
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


class Executor(Protocol):
    """Starts islands somewhere and tells what becomes of them."""

    def dry_run(self, replicas: Sequence[Replica]) -> None:
        """Print every file, command and call; ask and change nothing."""
        ...

    def connect(self, store: ObjectStore | None) -> None:
        """Check what it needs, such as an account; raises `LaunchFailed`.

        `store` is where the islands meet, if they do not meet by a lighthouse.
        """
        ...

    def launch_replicas(self, replicas: Sequence[Replica]) -> None:
        """Start the islands. Waits until each is accepted; ends the others if one is not."""
        ...

    def poll(self) -> list[ReplicaState]:
        """Return the state of each island, by rank."""
        ...

    def collect(self, timeout_s: float | None = None) -> list[ReplicaState]:
        """Return the last state of each island. Waits until all have ended.

        Raises TimeoutError after `timeout_s`.
        """
        ...

    def cancel(self, grace_s: float) -> None:
        """End the islands, after `grace_s` for a checkpoint. Waits for their end."""
        ...
