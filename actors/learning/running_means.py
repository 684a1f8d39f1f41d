"""Running means over the steps of a run that channels' weights follow; part of checkpoints.

Known to all ranks alike, and deterministic over resumes: a step reads what the steps before it
left, and a checkpoint keeps it.
"""

from collections.abc import Mapping

RATE = 0.1
"""Weight of a new value: a mean over about the last ten steps that have one."""


class RunningMeans:
    """Exponential means by name, each corrected for its beginning at 0 as Adam's moments are."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def __getitem__(self, name: str) -> float | None:
        """Return a mean; None before its first value."""
        total, weight = self._sums.get(name, (0.0, 0.0))
        return total / weight if weight else None

    def note(self, values: Mapping[str, float | None]) -> None:
        """Take the values of a step; None is no value."""
        for name, value in values.items():
            if value is not None:
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (
                    (1 - RATE) * total + RATE * value,
                    (1 - RATE) * weight + RATE,
                )

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state as JSON values."""
        return {name: list(sums) for name, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore a state."""
        self._sums = {
            name: (float(total), float(weight)) for name, (total, weight) in state.items()
        }
