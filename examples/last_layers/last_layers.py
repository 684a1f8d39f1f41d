"""A trainer backend: only the last decoder layers are trained, their matrices by Muon.

    pip install ./examples/last_layers
    composer-mesh train examples/last_layers/last_layers.toml

It derives from the backend that runs use by default, so adapters, precision and the rest of
[trainer] hold, and what generators and checkpoints get is unchanged.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_mesh import BackendContext, TorchBackend


class LastLayers(TorchBackend):
    """Trains the last `layers` of a model; matrices by Muon at `muon_rate` times trainer.lr."""

    def __init__(self, context: BackendContext, layers: int = 1, muon_rate: float = 7.0) -> None:
        super().__init__(context)
        self._layers, self._muon_rate = layers, muon_rate

    def model(self, folder: Path) -> Any:
        """Load the model and freeze all but its last layers."""
        model = super().model(folder)
        model.requires_grad_(False)
        model.base_model.layers[-self._layers :].requires_grad_(True)
        return model

    def optimizers(self, weights: Mapping[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        """Return Muon for the matrices and AdamW for the norms; rates follow the schedule."""
        lr = self.context.trainer.lr
        matrices = [one for one in weights.values() if one.ndim == 2]
        others = [one for one in weights.values() if one.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=self._muon_rate * lr, weight_decay=0.0),
            torch.optim.AdamW(others, lr=lr, weight_decay=0.0),
        ]
