"""The end of an optimizer step: gradients of all ranks are clipped and applied.

Gradients of sharded weights are already summed by the backward pass; those of weights that every
rank holds completely, such as adapters, are summed here.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.backend import Optimizers, optimizers_of
from composer_mesh.actors.models.optimizer_state import (
    CPU,
    OffloadedOptimizers,
    StoredOptimizerState,
    check_weights,
    optimizer_state_of,
    restore_optimizer_state,
)
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor, local
from composer_mesh.channels.weights import share_done, share_of_peak
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig


class NormNotFinite(ArithmeticError):
    """The norm of an update's gradient, and its learning rate."""

    def __init__(self, norm: float, rate: float) -> None:
        super().__init__(norm, rate)
        self.norm, self.rate = norm, rate


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of a run of `steps`."""
    done = share_done(config.warmup_steps, step, steps)
    return config.lr * share_of_peak(
        config.lr_schedule, config.warmup_steps, config.min_lr_ratio, step, done
    )


class WeightUpdate:
    """The optimizers of a model's trainable weights, the config's unless others are made."""

    def __init__(
        self, model: Any, config: Config, ranks: Ranks, make: Optimizers | None = None
    ) -> None:
        trainer = config.trainer
        self._config, self._ranks, self._steps = trainer, ranks, config.run.steps
        # Stored now, as a sharded model exposes other tensors during a forward.
        self._weights = {n: one for n, one in model.named_parameters() if one.requires_grad}
        optimizers = (make or partial(optimizers_of, trainer))(self._weights)
        self._optimizers = list(optimizers)
        self._offloaded: OffloadedOptimizers | None = None
        if trainer.optimizer_offload:
            self._offloaded = OffloadedOptimizers(self._optimizers, ranks.device)
        groups = [group for one in self._optimizers for group in one.param_groups]
        self._rates = [(group, _share(group["lr"], trainer.lr)) for group in groups]
        self._updated = False

    def begin(self) -> None:
        """Clear all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def apply(
        self,
        step: int,
        before_update: Callable[[], object],
        summed: bool = False,
        share: float = 1.0,
    ) -> tuple[float, float]:
        """Update the weights after `before_update` returns; return gradient norm and learning rate.

        `summed` gradients are already those of all ranks. The rate is a `share` of the schedule's.
        Raises `NormNotFinite` before any weight is changed, and `UnsupportedState` for an optimizer
        whose state is not of tensors.
        """
        weights = list(self._weights.values())
        if not summed:
            self._ranks.sum_gradients(one for one in weights if not is_dtensor(one))
        total: Any = torch.nn.utils.clip_grad_norm_(weights, self._config.grad_clip)
        norm = float(total.full_tensor() if is_dtensor(total) else total)
        rate = share * learning_rate(self._config, step, self._steps)
        if not math.isfinite(norm):
            raise NormNotFinite(norm, rate)
        for group, of_group in self._rates:
            _set_rate(group, of_group * rate)
        before_update()
        self._step()
        if not self._updated:
            self.optimizer_state()  # raises for one that no checkpoint could store
        self._updated = True
        return norm, rate

    def _step(self) -> None:
        if self._offloaded is not None:
            self._offloaded.step()
            return
        for optimizer in self._optimizers:
            optimizer.step()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable weights by name."""
        return self._weights

    def not_finite(self) -> int:
        """Return how many numbers of this rank's weights are nan or infinite."""
        return sum(int((~local(one).isfinite()).sum()) for one in self._weights.values())

    def trained(self) -> list[str]:
        """Return the names of the trainable weights."""
        return list(self._weights)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer state; shares its memory."""
        return optimizer_state_of(self._weights, self._optimizers)

    def restore(self, trained: list[str], optimizer_state: StoredOptimizerState) -> None:
        """Restore the optimizer state of weights with these names; raises `StateOfOtherWeights`."""
        check_weights(self._weights, trained)
        device = None if self._offloaded is None else CPU
        restore_optimizer_state(self._weights, self._optimizers, optimizer_state, device)
        if self._offloaded is not None:
            self._offloaded.pin()


def _share(rate: float | Tensor, peak: float) -> float:
    """Return a group's rate as a share of `trainer.lr`, in the precision of the group's rate."""
    if isinstance(rate, Tensor):
        return float(rate / torch.tensor(peak, dtype=rate.dtype, device=rate.device))
    return rate / peak


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's rate; one that is a tensor, as compiled updates need it, is filled in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
