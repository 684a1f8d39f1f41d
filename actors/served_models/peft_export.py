"""A model's adapters as peft reads them: `adapter_config.json` and its safetensors."""

from __future__ import annotations

import json

from safetensors.torch import save

from composer_mesh.actors.served_models.adapter_layers import AdapterLayout
from composer_mesh.actors.served_models.model_state import StoredState

PREFIX = "base_model.model."


def peft_files(
    stored: StoredState, layout: AdapterLayout, base: str, alpha: float
) -> dict[str, bytes]:
    """Return the files of a folder for `PeftModel.from_pretrained`, by name."""
    weights = stored.tensors["weights"][None]
    tensors = {}
    for name, (down, up) in layout.pairs(weights).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = down[0].contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = up[0].contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": layout.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name for name, _, _ in layout.layers],
        "inference_mode": True,
    }
    return {
        "adapter_config.json": json.dumps(config, indent=2).encode(),
        "adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }
