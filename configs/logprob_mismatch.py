"""When the trainer and the engines that sample for it disagree too much, and what then happens.

How the difference is measured is the trainer's business; correcting for it is the loss's.
"""

from typing import Literal

from composer_mesh.configs.base import Count, Positive, Section


class LogprobMismatchConfig(Section):
    """Bounds of the difference between trainer's and generator's log-probs of the same tokens."""

    bound: Positive = 0.2
    """Difference, in nats, above which a token counts in `logprob_mismatch/above`."""

    alarm_mean: Positive = 0.05
    """Alarm: largest mean difference of tokens sampled by the very version that is trained."""

    alarm_max: Positive = 2.0
    """Alarm: largest difference of one such token."""

    alarm_lagged_mean: Positive = 0.5
    """Alarm: largest mean difference of all tokens, what the policy has learnt since included."""

    on_alarm: Literal["warn", "stop"] = "warn"
    """"warn": an event and a line in the log; "stop": the run ends, after a checkpoint."""

    cooldown_steps: Count = 20
    """Steps after an alarm in which further ones are only counted."""
