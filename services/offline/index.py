"""Index of the trace groups of an offline replay, independent of their storage.

Only the locations of groups are in memory, because the traces may exceed it. `traces` and `stored`
build the index.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.offline.options import ReplayRefused


class TraceFileError(ReplayRefused):
    """Traces that cannot be replayed; names the file and line, the reason and the repair."""


class Place(Protocol):
    """Location of some traces of a group."""

    def read(self) -> list[Trace]: ...


@dataclass
class TraceIndex:
    """Groups of traces by `group_id`, and the run that wrote them, if known.

    `mark` is stable while traces are only appended. `cut` counts incomplete last lines that were
    skipped.
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
        """Yield each group's traces in id order; one group is in memory at a time."""
        for group_id in sorted(self.places):
            yield [trace for place in self.places[group_id] for trace in place.read()]
