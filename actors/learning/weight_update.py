"""The end of an optimizer step: gradients of all ranks are clipped and applied.

Gradients of sharded weights are already summed by the backward pass; those of weights that every
rank holds completely, such as adapters, are summed here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.schedules import learning_rate
from composer_mesh.actors.models.optimizer_state import (
    Kept,
    check_weights,
    optimizer_state_of,
    restore_optimizer_state,
)
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.rows import is_dtensor
from composer_mesh.configs.schema import Config


class WeightUpdate:
    """AdamW on the trainable weights of a model."""

    def __init__(self, model: Any, config: Config, ranks: Ranks) -> None:
        trainer = config.trainer
        self._config, self._ranks, self._steps = trainer, ranks, config.run.steps
        # Stored now, as a sharded model exposes other tensors during a forward.
        self._weights = {n: one for n, one in model.named_parameters() if one.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._weights.values(),
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )

    def begin(self) -> None:
        """Clear all gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def apply(self, step: int, before_update: Callable[[], object]) -> tuple[float, float]:
        """Update the weights after `before_update` returns; return gradient norm and learning rate.

        Raises RuntimeError for a norm that is not finite.
        """
        weights = list(self._weights.values())
        self._ranks.sum_gradients(one for one in weights if not is_dtensor(one))
        norm = torch.nn.utils.clip_grad_norm_(
            weights, self._config.grad_clip, error_if_nonfinite=True
        )
        rate = learning_rate(self._config, step, self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        before_update()
        self._optimizer.step()
        return float(norm.full_tensor() if is_dtensor(norm) else norm), rate

    def trained(self) -> list[str]:
        """Return the names of the trainable weights."""
        return list(self._weights)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer state; shares its memory."""
        return optimizer_state_of(self._weights, self._optimizer)

    def restore(self, trained: list[str], optimizer_state: Kept) -> None:
        """Restore the optimizer state of weights with these names; raises `OtherWeights`."""
        check_weights(self._weights, trained)
        restore_optimizer_state(self._weights, self._optimizer, optimizer_state)
