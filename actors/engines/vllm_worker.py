"""What vLLM's workers do in addition: take all of the policy's new weights, report experts.

vLLM imports the class by its name in every worker process and adds its methods to the worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_mesh.configs.worded import Worded

if TYPE_CHECKING:  # settings name the class before anything imports torch
    from torch import Tensor

    from composer_mesh.actors.engines.vllm_expert_slots import RouterNotes

RELOAD, HAS_HEAD = "reload_policy", "policy_has_head"
NOTE_EXPERTS, CHOSEN_EXPERTS = "note_experts", "chosen_experts"
EXTENSION = f"{__name__}.PolicyWorker"


class WeightsNotTaken(Worded, RuntimeError):
    """Layers kept their weights through an update: how many, of which model, and some names."""

    message = (
        "vLLM took no new weights for {0} layers of {1}, among them {2}: it cannot update this "
        "model in place, so serve it with another version of vLLM, or set generator.engine to "
        "'embedded'"
    )


class PolicyWorker:
    """Methods that are called through `collective_rpc`."""

    rank: int
    model_runner: Any
    vllm_config: Any
    router_notes: RouterNotes | None

    def note_experts(self, layers: list[int], per_token: int) -> None:
        """Let the routers of these layers tell the experts that they choose, from now on.

        All workers of an engine choose the same; the first notes. Raises `ExpertsNotNoted`.
        """
        from composer_mesh.actors.engines.vllm_expert_slots import RouterNotes

        if not self.rank:
            self.router_notes = RouterNotes(self, layers, per_token)

    def chosen_experts(self, request: str, start: int, end: int) -> Tensor | None:
        """Return the experts [positions, layers, per_token] of a request that has just run.

        Its positions from `start` to before `end`; None from all workers but the first.
        """
        notes = getattr(self, "router_notes", None)
        return None if notes is None else notes.of(request, start, end)

    def policy_has_head(self) -> bool:
        """Return whether the served model has a head of its own, or one more name for it."""
        named = self.model_runner.get_model().named_parameters(remove_duplicate=False)
        return any(name.startswith("lm_head.") for name, _ in named)

    def reload_policy(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
    ) -> None:
        """Replace all weights by those of an iterator, or of a folder of safetensors files.

        Raises `WeightsNotTaken`; the engine is then unusable.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        weights = _read(Path(weights_path)) if weights_path is not None else weights_iterator
        with set_current_vllm_config(self.vllm_config):
            _forget_packed_experts(model)
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            if kept := _layers_without_new_weights(model):
                raise WeightsNotTaken(len(kept), type(model).__name__, ", ".join(kept[:3]))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        notes = getattr(self, "router_notes", None)
        if notes is not None:
            notes.slots.clear()


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all files of a folder, one file in memory at a time."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _forget_packed_experts(model: Any) -> None:
    """Let a reload pack the weights of experts again, as their kernels for CPU read them.

    vLLM 0.32 packs them only where a layer has no kernel yet: after a reload, those for CPU would
    read unpacked weights. GPUs' kernels have nothing to pack.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _layers_without_new_weights(model: Any) -> list[str]:
    """Return the layers for whose parameters a reload that is not finished has seen nothing.

    vLLM would put their old weights back, and only log it. Scales of attention are its own.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, layer in model.named_modules():
        about = get_layerwise_info(layer)
        own = any(one is not None for one in layer._parameters.values())
        waits = about.can_load() and not about.load_numel
        if own and waits and not is_deferred_attention_layer(layer):
            found.append(name)
    return found
