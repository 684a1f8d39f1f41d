"""Alarm thresholds for the log-prob mismatch between trainer and generators.

The trainer measures the mismatch; the loss corrects for it.
"""

from typing import Literal

from composer_mesh.configs.base import Count, Positive, Section


class LogprobMismatchConfig(Section):
    """Bounds on the difference between trainer and generator log-probs of the same tokens."""

    bound: Positive = 0.2
    """Difference in nats above which a token counts in `logprob_mismatch/above`."""

    alarm_mean: Positive = 0.05
    """Alarm: largest mean difference of tokens sampled by the version that is being trained."""

    alarm_max: Positive = 2.0
    """Alarm: largest difference of one such token."""

    alarm_lagged_mean: Positive = 0.5
    """Alarm: largest mean difference of all tokens, including the effect of policy updates."""

    all_tokens: bool = False
    """Whether to measure also rollouts with an advantage of 0 that nothing else needs, at the cost
    of their forward in the trainer."""

    on_alarm: Literal["warn", "stop"] = "warn"
    """"warn": an event and a log line; "stop": the run ends, after a checkpoint."""

    cooldown_steps: Count = 20
    """Steps after an alarm in which further alarms are only counted."""
