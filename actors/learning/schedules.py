"""The learning-rate schedule: the rate of each optimizer step."""

import math

from composer_mesh.configs.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of a run of `steps`.

    The rate rises linearly to the peak at the last warm-up step, then decays to `min_lr_ratio` of
    the peak, which the step after the last one would have.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * _left(config, done))


def _left(config: TrainerConfig, done: float) -> float:
    """Return the decay factor (1 to 0) after the share `done` of the steps."""
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
