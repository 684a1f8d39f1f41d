"""The groups of traces that an offline replay goes through, wherever they stand.

Only the places of groups are in memory: the traces may be larger than it. Who finds them is
`traces` and `stored`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.offline.options import ReplayRefused


class TraceFileError(ReplayRefused):
    """Traces that cannot be replayed: which file and line, why, and what to do."""


class Place(Protocol):
    """Where some traces of a group stand."""

    def read(self) -> list[Trace]: ...


@dataclass
class TraceIndex:
    """The groups of some traces by `group_id`, and which run wrote them, where one is known.

    `mark` stays the same while traces are only added. `cut` counts last lines that were left out
    because their writer did not finish them.
    """

    run: Path | None
    mark: str = ""
    task: str = ""
    traces: int = 0
    cut: int = 0
    places: dict[int, list[Place]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    def groups(self) -> Iterator[list[Trace]]:
        """Each group's traces, in the order of the ids; one group is in memory at a time."""
        for group_id in sorted(self.places):
            yield [trace for place in self.places[group_id] for trace in place.read()]
