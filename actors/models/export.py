"""A model in training as others know it: its weights under the names of the Hugging Face model.

Adapters are merged into the weights that they adapt. Moves no bytes between ranks and may be
called beside a forward; who copies, publishes or writes the tensors is not known here.
"""

from typing import Any

from torch import Tensor

from composer_mesh.actors.models.lora import ADAPTER, PARTS, adapted_layers, merged
from composer_mesh.actors.models.sharding import own_weights

BASE = ".base_layer."


def export_state(model: Any) -> dict[str, Tensor]:
    """Every tensor of the Hugging Face model, in the same order on every rank.

    Tensors that are spread over ranks are `DTensor`s of this rank's rows. Names of one tensor have
    one object. What no adapter changes shares memory with the model.
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
