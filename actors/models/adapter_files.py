"""Adapters as the files of a folder that peft reads: `adapter_config.json` and its safetensors.

Exports a training model's weights under the names of the Hugging Face model.

Adapters are merged into the weights that they adapt. Moves no bytes between ranks and may run
concurrently with a forward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from composer_mesh.actors.models.lora import ADAPTER, PARTS, adapted_layers, merged
from composer_mesh.actors.models.sharding import own_weights
from composer_mesh.configs.trainer import LoraConfig

BASE = ".base_layer."


def export_state(model: Any) -> dict[str, Tensor]:
    """Return every tensor of the Hugging Face model, in the same order on every rank.

    Sharded tensors are `DTensor`s with this rank's rows. Several names of one tensor map to one
    object. Tensors without an adapter share memory with the model.
    """
    weights = own_weights(model)
    state = {
        name.replace(BASE, "."): tensor
        for name, tensor in weights.items()
        if not name.endswith(PARTS)
    }
    for name, layer in adapted_layers(model):
        base, down, up = (weights[name + part] for part in (f"{BASE}weight", *PARTS))
        state[f"{name}.weight"] = merged(base, down, up, layer.scaling[ADAPTER])
    return state


PREFIX = "base_model.model."
FOLDER = "adapter"
"""Folder of a run's adapters in a checkpoint."""

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""The matrices A [rank, in] and B [out, rank] of each adapted layer, by its name."""


def adapter_files(
    pairs: Pairs,
    base: str,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    revision: str | None = None,
) -> dict[str, bytes]:
    """Return the files of a folder for `PeftModel.from_pretrained`, by name."""
    tensors = {}
    for name, (down, up) in pairs.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = down.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = up.contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "target_modules": list(pairs),
        "inference_mode": True,
    }
    return {
        "adapter_config.json": json.dumps(config, indent=2).encode(),
        "adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }


class AdapterFolder:
    """Writes the adapters of a run that trains some; `base` names the model that they adapt.

    `revision` is that of a model on a hub.
    """

    def __init__(self, config: LoraConfig, base: str, revision: str | None = None) -> None:
        self._config, self._base, self._revision = config, base, revision

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the trained weights, by their names in the model, to `adapter/` in a folder."""
        down, up = PARTS
        pairs = {
            name.removesuffix(down): (weights[name], weights[name.removesuffix(down) + up])
            for name in weights
            if name.endswith(down)
        }
        config = self._config
        rank, alpha, dropout = config.rank, config.alpha, config.dropout
        files = adapter_files(pairs, self._base, rank, alpha, dropout, self._revision)
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / FOLDER / name).write_bytes(content)
