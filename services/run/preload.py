"""What the fork servers of a run import before the first fork: what most of its processes use.

Everything here is free of Monarch, whose threads a fork would not have.
"""

from __future__ import annotations

PRELOAD = (
    "composer_mesh.actors.models.torchao_before_fork",  # before transformers imports torchao
    *("torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "httpx", "jaxtyping"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
    *("composer_mesh.configs.schema", "composer_mesh.rollouts.chat"),
    *("composer_mesh.rollouts.packing", "composer_mesh.losses.grpo"),
    *("composer_mesh.rollouts.step_plan", "composer_mesh.mesh.weights.transports"),
    "composer_mesh.actors.learning.policy_channel",
    *("composer_mesh.actors.learning.replay_channel", "composer_mesh.actors.checkpoints.state"),
    *("composer_mesh.actors.models.trained_model", "composer_mesh.actors.models.lora"),
    *("composer_mesh.actors.models.warm_start", "composer_mesh.actors.engines.embedded"),
    *("composer_mesh.actors.engines.loop", "composer_mesh.actors.panel.panel"),
)
