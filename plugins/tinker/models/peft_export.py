"""The adapters of a served model as peft reads them."""

from __future__ import annotations

from composer_mesh.actors.models.adapter_files import PREFIX, adapter_files
from composer_mesh.plugins.tinker.models.adapter_layers import AdapterLayout
from composer_mesh.plugins.tinker.models.model_state import StoredState

__all__ = ["PREFIX", "peft_files"]


def peft_files(
    stored: StoredState, layout: AdapterLayout, base: str, alpha: float
) -> dict[str, bytes]:
    """Return the files of a folder for `PeftModel.from_pretrained`, by name."""
    weights = stored.tensors["weights"][None]
    pairs = {name: (down[0], up[0]) for name, (down, up) in layout.pairs(weights).items()}
    return adapter_files(pairs, base, layout.rank, alpha)
