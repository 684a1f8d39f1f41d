"""`ComposerReplicationTrainer`: the composer-replication framework's trainer, by its own names."""

from __future__ import annotations

from typing import Any

from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.pairs import PairSource
from composer_mesh.plugins.frameworks.trl.trainer import ComposerGRPOTrainer

ALIASES = {
    "loss/policy": "loss/grpo",
    "loss/sdpo": "loss/sdpo_kl",
    "loss/replay": "loss/trace_replay_dpo",
}
"""What the framework calls our figures; `loss/total` has one name."""


class ComposerReplicationTrainer(ComposerGRPOTrainer):
    """`ComposerGRPOTrainer` with the framework's weights and figures.

    Without `pairs` the replay channel is off, whatever `beta_replay` is.
    """

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.1,
        beta_replay: float = 0.05,
        pairs: PairSource | None = None,
        **options: Any,
    ) -> None:
        replay = WeightedPreferenceConfig(beta=0.0 if pairs is None else beta_replay)
        sdpo = SdpoConfig(alpha=alpha_sdpo)
        super().__init__(*args, sdpo=sdpo, replay=replay, pairs=pairs, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the figures by both names."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for own, theirs in ALIASES.items():
            if own in metrics:
                metrics[theirs] = list(metrics[own])
        super().log(logs, start_time)
