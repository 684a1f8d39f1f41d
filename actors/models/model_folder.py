"""Writes the policy in Hugging Face format during training, for transformers and vLLM.

Holds the model's structure and its tokenizer but no weights, so that it may write in another thread
while the model is trained.
"""

from pathlib import Path

from torch import Tensor

from composer_mesh.actors.models.checkpoint_names import CheckpointNames
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.tokenizer import load_tokenizer


class ModelFolder:
    """Writes folders with the architecture of the initial policy, and its names of tensors."""

    def __init__(self, initial: Path) -> None:
        from transformers import GenerationConfig

        self._model, self._tokenizer = CheckpointNames(initial).model, load_tokenizer(initial)
        if (initial / "generation_config.json").exists():
            self._model.generation_config = GenerationConfig.from_pretrained(initial)

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the policy with these weights, each tensor under its first name."""
        save_policy(self._model, self._tokenizer, folder, weights)
