"""Selects a generator's engine. Each is imported only where it is chosen."""

from pathlib import Path

from composer_mesh.actors.engines.port import Engine
from composer_mesh.configs import plugins
from composer_mesh.configs.schema import Config


def make_engine(config: Config, folder: Path) -> Engine:
    """Return the configured engine, serving the model of `folder` as version 0. Takes seconds."""
    engine: Engine = plugins.load("engines", config.generator.engine)(config, folder)
    return engine


def embedded_engine(config: Config, folder: Path) -> Engine:
    """Return the embedded engine, serving the model of `folder` as version 0."""
    import torch

    from composer_mesh.actors.engines import embedded
    from composer_mesh.actors.models.lora import adapter_weights, add_adapters
    from composer_mesh.actors.models.policy import converted, load_model
    from composer_mesh.actors.models.trained_model import route_experts
    from composer_mesh.mesh.device import own_device
    from composer_mesh.mesh.weights.manifest import UPDATED

    dtype = getattr(torch, config.generator.dtype)
    model = converted(load_model(folder), dtype).to(own_device())
    if config.syncs_adapters and config.trainer.lora is not None:
        add_adapters(
            model, config.trainer.lora.model_copy(update={"dropout": 0.0}), config.run.seed
        )
        setattr(model.requires_grad_(False), UPDATED, set(adapter_weights(model)))
    moe = config.trainer.moe
    route_experts(model, moe, dtype, moe.router_replay, like=lambda: model)
    return embedded.Engine(
        model,
        config.generator.max_concurrent,
        config.policy.max_context,
        prefix_tokens=config.generator.prefix_tokens,
    )
