"""Compares the metrics of recomputed steps with those of their first run. Pure."""

from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.batches import StepBatch

Metrics = dict[str, Any]
COMPARED = ("loss/total", "policy/grad_norm")
"""Metrics that are compared between a step's first run and its recomputation."""


@dataclass(frozen=True)
class Trained:
    """A step trained since the checkpoint: its batch and its metrics."""

    batch: StepBatch
    metrics: Metrics

    @property
    def taught(self) -> bool:
        """Whether SDPO teachers of the mesh contributed to the step."""
        return bool(self.batch.views) and not self.metrics.get("sdpo/lost_steps")


@dataclass
class Differences:
    """Differences found between recomputed steps and their first run."""

    steps: int = 0
    untaught: int = 0
    largest: float = 0.0

    def note(self, past: Trained, again: Metrics) -> None:
        """Compare a recomputed step with its first run."""
        self.steps += 1
        self.untaught += past.taught and bool(again.get("sdpo/lost_steps"))
        for name in COMPARED:
            was, now = past.metrics.get(name), again.get(name)
            if was is not None and now is not None:
                self.largest = max(self.largest, abs(now - was) / max(abs(was), 1e-12))

    def __str__(self) -> str:
        """Return the number of steps and their largest difference, as a clause of a sentence."""
        steps = f"{self.steps} step{'s' * (self.steps != 1)} trained again"
        if self.untaught:
            return (
                f"{steps}, {self.untaught} of them without their SDPO signals, so its version is "
                f"served anew: losses and gradients differ by up to {self.largest:.1%}"
            )
        if self.largest:
            return (
                f"{steps}, whose losses and gradients differ by up to {self.largest:.1g} of their "
                "size"
            )
        return f"{steps} to the same losses and gradients" if self.steps else steps
