"""Values that change over a run: the learning rate, and the weights of the channels."""

import math
from collections.abc import Mapping

from composer_mesh.configs.channel_schedule import ChannelSchedule, Decay
from composer_mesh.configs.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of a run of `steps`."""
    done = _done(config.warmup_steps, step, steps)
    return config.lr * _share(
        config.lr_schedule, config.warmup_steps, config.min_lr_ratio, step, done
    )


def channel_weight(
    peak: float,
    schedule: ChannelSchedule,
    step: int,
    steps: int,
    followed: Mapping[str, float | None] | None = None,
) -> float:
    """Return a channel's weight in a step (0-based) of a run of `steps`.

    `followed` are the running success and agreement before the step; while the one that the
    schedule follows is unknown, the weight does not fall.
    """
    if schedule.by == "steps":
        done = _done(schedule.warmup_steps, step, steps)
    else:
        found = (followed or {}).get(schedule.by)
        value = schedule.start if found is None else found
        done = min(1.0, max(0.0, (value - schedule.start) / (schedule.end - schedule.start)))
    return peak * _share(schedule.decay, schedule.warmup_steps, schedule.min_ratio, step, done)


def _done(warmup_steps: int, step: int, steps: int) -> float:
    """Return the share of the steps after the warm-up that are done; the last one is below 1."""
    return (step - warmup_steps) / max(1, steps - warmup_steps)


def _share(decay: Decay, warmup_steps: int, least: float, step: int, done: float) -> float:
    """Return a step's value as a share of the peak.

    It rises linearly to the peak at the last warm-up step, then decays to `least` where `done` is
    1: in steps, the one after the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return least + (1 - least) * _left(decay, done)


def _left(decay: Decay, done: float) -> float:
    """Return the decay factor (1 to 0) after the share `done` of the decay."""
    match decay:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
