"""Load-balancing loss and router metrics of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.channels.step import Figures
from composer_mesh.configs.trainer import MoeConfig
from composer_mesh.rollouts.batches import PolicySample, StepBatch


class MixtureLosses:
    """Computes the load-balancing loss of microbatches, from the routing of their forward."""

    def __init__(self, config: MoeConfig) -> None:
        self._config = config

    def compares(self, step: int) -> bool:
        """Whether a step also measures the mismatch without router replay."""
        every = self._config.compare_every
        return self._config.router_replay and every > 0 and step % every == 0

    def loss(
        self,
        model: LanguageModel,
        samples: Sequence[PolicySample],
        batch: StepBatch,
        figures: Figures,
    ) -> Tensor | None:
        """Return the weighted loss of the forward that a model has just run; None without any.

        It is the microbatch's, times its share of the tokens of the batch. Adds the figures
        `moe/balance_loss`, a mean over layers that is 1 if all experts are equally busy, and
        `moe/rerouted`, the share of replayed choices that are not the trainer's own.
        """
        routing = model.routing
        if routing is None or not samples:
            return None
        if routing.given is not None:
            positions = sum(one.experts.positions for one in batch.samples if one.experts)
            choices = positions * routing.given.shape[1] * routing.given.shape[2]
            figures["moe/rerouted"] += routing.rerouted_choices() / choices
        share = sum(len(one.ids) for one in samples) / sum(len(one.ids) for one in batch.samples)
        loss = share * routing.balance_loss()
        figures["moe/balance_loss"] += float(loss.detach()) / len(routing.logits)
        return self._config.load_balancing * loss if self._config.load_balancing else None
