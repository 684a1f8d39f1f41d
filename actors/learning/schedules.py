"""Values that change over a run: the learning rate, and the weights of the channels."""

import math

from composer_mesh.configs.channel_schedule import ChannelSchedule, Decay
from composer_mesh.configs.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of a run of `steps`."""
    share = _share(config.lr_schedule, config.warmup_steps, config.min_lr_ratio, step, steps)
    return config.lr * share


def channel_weight(peak: float, schedule: ChannelSchedule, step: int, steps: int) -> float:
    """Return a channel's weight in a step (0-based) of a run of `steps`."""
    share = _share(schedule.decay, schedule.warmup_steps, schedule.min_ratio, step, steps)
    return peak * share


def _share(decay: Decay, warmup_steps: int, least: float, step: int, steps: int) -> float:
    """Return a step's value as a share of the peak.

    It rises linearly to the peak at the last warm-up step, then decays to `least`, which the step
    after the last one would have.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return least + (1 - least) * _left(decay, done)


def _left(decay: Decay, done: float) -> float:
    """Return the decay factor (1 to 0) after the share `done` of the steps."""
    match decay:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
