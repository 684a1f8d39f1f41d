"""LoRA adapters in a model's linear layers, and the merged weights.

peft inserts them; it is an optional extra. Where weights are sharded, adapters stay complete on
every rank: they are small, and merging them into a rank's rows then needs no other rank.

They are stored as the files of a folder that peft reads: `adapter_config.json` and its
safetensors. `export_state` merges them, under the names of the Hugging Face model; it moves no
bytes between ranks and may run concurrently with a forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from composer_mesh.actors.models.language_model import LanguageModel, text_decoder_of
from composer_mesh.actors.models.optimizer_state import StoredOptimizerState
from composer_mesh.actors.models.sharding import is_dtensor, own_weights
from composer_mesh.configs.trainer import LoraConfig
from composer_mesh.configs.worded import Worded
from composer_mesh.planning.model_refusals import LoraMissing, NoSuchLayers

ADAPTER = "default"
HELD = "policy"
PARTS = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")


class OtherAdapters(Worded, ValueError):
    """Adapters of a checkpoint that do not fit the model's."""

    message = (
        "{0} of shape {1} is either only in the checkpoint or only in the model: continue "
        "with the trainer.lora that the run began with"
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
        target_modules=[f"{HELD}.{name}" for name in adapted_layer_names(model, config.targets)],
    )
    # peft reads other targets out of these names where it sees a mixture of transformers.
    holder = nn.Module()
    holder.add_module(HELD, model)
    peft.inject_adapter_in_model(settings, holder, adapter_name=ADAPTER)
    for _, layer in adapted_layers(model):
        layer.lora_dropout.train()


def adapted_layer_names(model: Any, names: tuple[str, ...] | None) -> list[str]:
    """Return the whole names of the layers that get an adapter; raises `NoSuchLayers`."""
    possible = linear_layers(model)
    if names is None:
        if not possible:
            raise NoSuchLayers((), f"{type(model).__name__} has no linear layers in its decoder")
        return possible
    return fitting_layers(model, names, possible)


def fitting_layers(model: Any, names: tuple[str, ...], possible: list[str]) -> list[str]:
    """Return the layers among `possible` that have these last names; raises `NoSuchLayers`."""
    fitting = tuple(sorted({_last(name) for name in possible}))
    for name in names:
        if name not in fitting:
            raise NoSuchLayers(names, _unfit(model, name), fitting)
    return [name for name in possible if _last(name) in names]


def linear_layers(model: Any) -> list[str]:
    """Return the names of the decoder's linear layers that can have an adapter.

    Those next to a convolution cannot: fused kernels read their weights past the adapter.
    """
    decoder, found = text_decoder_of(model), []
    with_convolution = {
        id(one)
        for one in decoder.modules()
        if any(isinstance(child, nn.Conv1d) for child in one.children())
    }
    for name, layer in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        if type(layer) is nn.Linear and id(parent) not in with_convolution:
            found.append((name, layer))
    own = {id(one) for one in decoder.modules()}
    return [name for name, layer in found if id(layer) in own]


def _unfit(model: Any, name: str) -> str:
    """Return why layers of this name get no adapter."""
    for whole, layer in model.named_modules():
        if _last(whole) == name:
            if layer is model.get_output_embeddings():
                return f"{whole} is the head, which losses read without adapters"
            if type(layer) is not nn.Linear:
                return f"{whole} is a {type(layer).__name__}"
            return f"{whole} is outside of the decoder, or next to a convolution"
    return f"no layer is called {name}"


def _last(name: str) -> str:
    return name.rpartition(".")[-1]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of a model that have an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute without its adapters, as it was before training."""
    layers = [layer for _, layer in adapted_layers(model)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class BaseModel(LanguageModel):
    """A trained model without its adapters: the policy that a run began with."""

    def _states(self, **inputs: Any) -> Tensor:
        with adapters_off(self.model):
            return super()._states(**inputs)


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' weights by name; empty for a model without adapters."""
    return {n: weights for n, weights in model.named_parameters() if n.endswith(PARTS)}


@torch.no_grad()
def restore_adapters(own: Mapping[str, Tensor], kept: StoredOptimizerState) -> None:
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
    return DTensor.from_local(rows, mesh, base.placements, run_check=False, **shape)


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
