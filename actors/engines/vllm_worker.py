"""What vLLM's workers do in addition: take all of the policy's new weights, report experts.

vLLM imports the class by its name in every worker process and adds its methods to the worker's.

`ExpertSlots` has the experts that a worker's routers chose, one row for each slot of its KV cache.
vLLM's own output of them is part of its second model runner, which needs Triton and so a GPU. Here
each router hands its choices to the callback that vLLM has for that output, and they are kept where
the keys of the same tokens are: reused, recomputed and overwritten with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.configs.worded import Worded

RELOAD, HAS_HEAD = "reload_policy", "policy_has_head"
NOTE_EXPERTS, CHOSEN_EXPERTS = "note_experts", "chosen_experts"


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


UNKNOWN = -1


class ExpertsNotNoted(Worded, RuntimeError):
    """Experts that a worker cannot note, or has not noted: what, and why."""

    message = (
        "{0}: {1}, so vLLM on a CPU cannot report its choices of experts: set "
        "trainer.moe.router_replay to false, or generator.engine to 'embedded'"
    )


class ExpertSlots:
    """Numbers of experts [slots, layers, per_token] of the slots of a paged KV cache.

    `layers` are the numbers of the decoder layers with experts, in order.
    """

    def __init__(self, blocks: int, block: int, layers: Sequence[int], per_token: int) -> None:
        """There are `blocks` of `block` slots each."""
        self._block = block
        self._columns = {layer: column for column, layer in enumerate(layers)}
        shape = (blocks * block, len(layers), per_token)
        self._chosen = torch.full(shape, UNKNOWN, dtype=torch.int16)

    def clear(self) -> None:
        """Forget all, as keys of other weights are forgotten."""
        self._chosen.fill_(UNKNOWN)

    def note(self, layer: int, chosen: Tensor, slots: Tensor) -> None:
        """Note the experts [tokens, per_token] of a layer for the tokens at slots [tokens].

        Slots below 0 are padding.
        """
        if chosen.shape != (len(slots), self._chosen.shape[2]):
            raise ExpertsNotNoted(
                f"layer {layer}",
                f"it chose experts of shape {[*chosen.shape]} for {len(slots)} tokens, "
                f"{self._chosen.shape[2]} each",
            )
        real = slots >= 0
        self._chosen[slots[real], self._columns[layer]] = chosen[real].to(torch.int16)

    def of(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Return the experts [positions, layers, per_token] of the positions from `start` to before
        `end` of a request, in its blocks.

        Raises `ExpertsNotNoted` if no router reported those of a position.
        """
        positions = torch.arange(start, end)
        slots = torch.tensor(blocks)[positions // self._block] * self._block
        found = self._chosen[slots + positions % self._block]
        missing = int((found < 0).flatten(1).any(1).sum())
        if missing:
            raise ExpertsNotNoted(
                f"positions {start} to {end - 1}", f"no router reported those of {missing} of them"
            )
        return found


class RouterNotes:
    """What the routers of a worker's model chose, by the slots of the layers that attend to all."""

    def __init__(self, worker: Any, layers: Sequence[int], per_token: int) -> None:
        """Let the routers of the decoder layers `layers` tell their choices.

        Raises `ExpertsNotNoted` where the model has experts in other layers, or none that attends
        to all positions.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        self._runner = worker.model_runner
        model, cache = self._runner.get_model(), self._runner.kv_cache_config
        own = sorted(one.layer_id for one in model.modules() if isinstance(one, MoERunner))
        if own != [*layers]:
            raise ExpertsNotNoted(
                type(model).__name__, f"it has experts in layers {own}, its folder in {[*layers]}"
            )
        self._group = _whole_group(cache.kv_cache_groups)
        if self._group is None:
            raise ExpertsNotNoted(
                type(model).__name__, "no layer of it keeps keys of all positions"
            )
        group = cache.kv_cache_groups[self._group]
        self._attention = group.layer_names[0]
        block = group.kv_cache_spec.block_size
        self.slots = ExpertSlots(cache.num_blocks, block, layers, per_token)
        bind_routed_experts_capturer(model, self)

    def capture(self, layer_id: int, chosen: Tensor) -> None:
        """Note the experts [tokens, per_token] that a layer's router chose in this forward."""
        from vllm.forward_context import get_forward_context

        mapping: Any = get_forward_context().slot_mapping
        self.slots.note(layer_id, chosen, mapping[self._attention])

    def of(self, request: str, start: int, end: int) -> Tensor:
        """Return the experts [positions, layers, per_token] of a request that has just run.

        Its blocks are known here until the next step begins.
        """
        return self.slots.of(self._runner.requests[request].block_ids[self._group], start, end)


def _whole_group(groups: Sequence[Any]) -> int | None:
    """Return the number of the first group of layers whose blocks hold the keys of all positions.

    Subclasses of these kinds drop some, or keep one key for several tokens.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    whole = (FullAttentionSpec, MLAAttentionSpec)
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        if type(spec) in whole and spec.tokens_per_state == 1:
            return number
    return None
