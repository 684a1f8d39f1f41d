"""Lets the routers of a model be reached where a config asks for something of them."""

from collections.abc import Callable
from typing import Any

import torch

from composer_mesh.actors.models.expert_routing import (
    expert_sizes,
    intercept_routers,
    router_names,
)
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.trainer import MoeConfig


def route_experts(
    model: Any, moe: MoeConfig, dtype: torch.dtype, needed: bool, like: Callable[[], Any]
) -> None:
    """Intercept the routers of a mixture that computes in `dtype`, in place.

    They are looked for in the model that `like` returns, which has the same modules. Where they are
    `needed`, raises `UnsupportedRouting` if there are none.
    """
    float32 = moe.router_float32 and dtype != torch.float32
    if expert_sizes(model.config) is not None and (needed or float32):
        names = router_names(like())
        intercept_routers(model, decoder_layers(model), names, float32, needed)
