"""LoRA adapters in a model's linear layers, and the merged weights.

peft inserts them; it is an optional extra. Where weights are sharded, adapters stay complete on
every rank: they are small, and merging them into a rank's rows then needs no other rank.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.optimizer_state import Kept
from composer_mesh.actors.models.rows import is_dtensor
from composer_mesh.configs.trainer import LoraConfig

ADAPTER = "default"
PARTS = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")


class LoraMissing(ImportError):
    """Adapters are configured but peft is not installed."""

    def __str__(self) -> str:
        return (
            "trainer.lora is set but peft is not installed: pip install 'composer-mesh[lora]', or "
            "remove the section"
        )


class NoSuchLayers(ValueError):
    """The configured adapter targets are not suitable layers of the model."""

    def __init__(self, targets: tuple[str, ...], why: str) -> None:
        super().__init__(targets, why)

    def __str__(self) -> str:
        return (
            f"trainer.lora.targets is {', '.join(self.args[0])} but {self.args[1]}: name linear "
            "layers of the model"
        )


class OtherAdapters(ValueError):
    """Adapters of a checkpoint that do not fit the model's."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(name, shape)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} of shape {self.args[1]} is either only in the checkpoint or only in "
            "the model: go on with the trainer.lora that the run began with"
        )


def add_adapters(model: Any, config: LoraConfig, seed: int) -> None:
    """Freeze a model's weights and add adapters with a zero initial effect, in place.

    The same seed gives the same adapters. Dropout is on also in evaluation mode.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise LoraMissing() from error
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
    )
    _check_targets(model, config.targets)
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for _, layer in adapted_layers(model):
        layer.lora_dropout.train()


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    named = [(name, layer) for name, layer in model.named_modules() if _last(name) in targets]
    for target in targets:
        if not any(_last(name) == target for name, _ in named):
            raise NoSuchLayers(targets, f"no layer is called {target}")
    for name, layer in named:
        if layer is model.get_output_embeddings():
            raise NoSuchLayers(targets, f"{name} is the head, which losses read without adapters")
        if type(layer) is not nn.Linear:
            raise NoSuchLayers(targets, f"{name} is a {type(layer).__name__}")


def _last(name: str) -> str:
    return name.rpartition(".")[-1]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of a model that have an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' weights by name; empty for a model without adapters."""
    return {n: weights for n, weights in model.named_parameters() if n.endswith(PARTS)}


@torch.no_grad()
def restore_adapters(own: Mapping[str, Tensor], kept: Kept) -> None:
    """Load stored adapter weights into a model's own, in place; names and shapes must be equal."""
    shapes, others = {n: tuple(w.shape) for n, w in own.items()}, kept.shapes()
    if shapes != others:
        raise OtherAdapters(*min(set(shapes.items()) ^ set(others.items())))
    kept.read({name: weights.detach() for name, weights in own.items()})


@torch.no_grad()
def merged(base: Any, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the weight [out, in] of a layer with its adapter: base + scale * up @ down.

    For a row-sharded weight, this rank's rows.
    """
    if not is_dtensor(base):
        return torch.addmm(base, up, down, alpha=scale)
    from torch.distributed.tensor import DTensor

    mesh, own = base.device_mesh, base.to_local()
    most = -(-base.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, base.shape[0])
    rows = torch.addmm(own, up[first : first + len(own)], down, alpha=scale)
    shape = {"shape": base.shape, "stride": base.stride()}
    found: Tensor = DTensor.from_local(rows, mesh, base.placements, run_check=False, **shape)
    return found
