"""The files of a checkpoint's archive, from the weights that a client saved."""

from __future__ import annotations

from pathlib import Path

from composer_mesh.actors.models.policy import empty_model
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.adapter_layers import AdapterLayout
from composer_mesh.plugins.tinker.models.model_state import read_state
from composer_mesh.plugins.tinker.models.peft_export import peft_files


def archive_files(config: Config, folder: Path, base: str, path: Path) -> dict[str, bytes]:
    """Return what peft loads; of all weights, the file as it is. Takes a second."""
    stored = read_state(path)
    if stored.spec.rank == 0:
        return {"weights.safetensors": path.read_bytes()}
    layout = AdapterLayout.of(empty_model(folder), stored.spec)
    return peft_files(stored, layout, base, config.serve.lora_alpha)
