"""Steps that are trained once more, and what is not the same then.

Pure: who trains them, and when, is not known here.
"""

from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.batches import StepBatch

Metrics = dict[str, Any]
COMPARED = ("loss/total", "policy/grad_norm")
"""What tells whether a step that was trained again was trained as before."""


@dataclass(frozen=True)
class Trained:
    """A step since the checkpoint: what was trained, and what came of it."""

    batch: StepBatch
    metrics: Metrics

    @property
    def taught(self) -> bool:
        """Whether teachers of the mesh had a part in it."""
        return bool(self.batch.views) and not self.metrics.get("sdpo/lost_steps")


@dataclass
class Differences:
    """What was not the same when steps were trained again."""

    steps: int = 0
    untaught: int = 0
    largest: float = 0.0

    def note(self, past: Trained, again: Metrics) -> None:
        """Compare a step with its first time."""
        self.steps += 1
        self.untaught += past.taught and bool(again.get("sdpo/lost_steps"))
        for name in COMPARED:
            was, now = past.metrics.get(name), again.get(name)
            if was is not None and now is not None:
                self.largest = max(self.largest, abs(now - was) / max(abs(was), 1e-12))

    def __str__(self) -> str:
        """How many steps there were, and how they differ, as a part of a sentence."""
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
