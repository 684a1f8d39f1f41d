"""Monitors the trainer-generator log-prob mismatch and raises an alarm where it is too large.

Judges one step at a time from its metrics. The trainer measures; the controller stops the run.

Compares the metrics of recomputed steps with those of their first run. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_mesh.configs.logprob_mismatch import LogprobMismatchConfig
from composer_mesh.mesh.supervision import MeshError, Recorder
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


REPAIR = (
    "look for an engine with other numerics, stale weights or a stale cache; set loss.correction "
    "to train on, or raise logprob_mismatch.{key} where this is known and wanted"
)


class LogprobMismatchTooLarge(MeshError):
    """Log-probs of trainer and generators differ too much for the same tokens.

    Its arguments are the step, what differs, the value in nats, and the key and value of the bound.
    """

    def __str__(self) -> str:
        step, what, value, key, bound = self.args
        return (
            f"step {step}: trainer and generators differ by {value:.3g} nats ({what}), "
            f"logprob_mismatch.{key} is {bound:g}: {REPAIR.format(key=key)}"
        )


@dataclass(frozen=True)
class _Rule:
    """A metric, its description, and the config key of its bound."""

    metric: str
    what: str
    key: str


RULES = (
    _Rule("same_version/mean", "mean over tokens of the trained version", "alarm_mean"),
    _Rule("same_version/max", "one token of the trained version", "alarm_max"),
    _Rule("mean", "mean over all tokens, policy lag included", "alarm_lagged_mean"),
)


class LogprobMismatchMonitor:
    """Alarms of a run: an event, or an error that ends it. Steps must be judged in order."""

    def __init__(self, config: LogprobMismatchConfig, record: Recorder) -> None:
        self._config, self._record = config, record
        self._quiet_until, self._silent_steps = 0, 0

    def judge(self, metrics: Mapping[str, Any]) -> LogprobMismatchTooLarge | None:
        """Record an alarm if the step has one; return it if it must end the run.

        During the cool-down after an event, further alarms are counted and reported with the next
        event.
        """
        alarm = self._alarm(metrics)
        if alarm is None:
            return None
        stops = self._config.on_alarm == "stop"
        if stops or metrics["step"] >= self._quiet_until:
            self._tell(alarm, metrics)
        else:
            self._silent_steps += 1
        return alarm if stops else None

    def _alarm(self, metrics: Mapping[str, Any]) -> LogprobMismatchTooLarge | None:
        for rule in RULES:
            value, bound = (
                metrics.get(f"logprob_mismatch/{rule.metric}"),
                getattr(self._config, rule.key),
            )
            if value is not None and value > bound:
                return LogprobMismatchTooLarge(metrics["step"], rule.what, value, rule.key, bound)
        return None

    def _tell(self, alarm: LogprobMismatchTooLarge, metrics: Mapping[str, Any]) -> None:
        steps = self._silent_steps
        more = f" (and in {steps} steps since the alarm before)" if steps else ""
        figures = {n: v for n, v in metrics.items() if n.startswith("logprob_mismatch/")}
        self._record(
            "logprob_mismatch_alarm", "trainer", f"{alarm}{more}", step=metrics["step"], **figures
        )
        self._quiet_until = metrics["step"] + self._config.cooldown_steps
        self._silent_steps = 0
