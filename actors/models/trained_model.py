"""Builds the model that a trainer's rank trains, from a folder.

    load -> adapters -> checkpointed, compiled layers -> sharded

All ranks build it together. Where weights are sharded only the first rank reads them, and the
others never hold more than one complete tensor.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer_mesh.actors.models.attention_calls import PACKED
from composer_mesh.actors.models.expert_parallel import (
    CONTEXT,
    ContextGroup,
    check_experts,
    check_has_experts,
    divide_experts,
)
from composer_mesh.actors.models.expert_routing import expert_sizes, intercept_routers, router_names
from composer_mesh.actors.models.language_model import LanguageModel, layer_kinds
from composer_mesh.actors.models.lora import adapter_weights, add_adapters
from composer_mesh.actors.models.policy import attention_of, converted, empty_model, load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import (
    broadcast_into,
    decoder_layers,
    is_sharded,
    own_weights,
    release,
    remember_weights,
    shard,
)
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import MoeConfig, TrainerConfig
from composer_mesh.mesh.progress import made_progress
from composer_mesh.planning.model_facts import check_heads
from composer_mesh.planning.model_refusals import UndividedContext, UnfitModel, UnknownLayers

logger = logging.getLogger(__name__)


def trained_model(config: Config, folder: Path, ranks: Ranks) -> Any:
    """Return the model to train, on the rank's device.

    Raises `UnfitModel` for models that the losses cannot train as configured, for attention that
    the device does not support, and for adapters and sharding that do not fit.
    """
    trainer = config.trainer
    if trainer.attention in ("flex", "flash") and ranks.device.type == "cpu":
        raise UnfitModel(
            f"trainer.attention is {trainer.attention!r} but the trainer computes on a CPU, where "
            "only sdpa and eager have a backward: set it to 'sdpa', or placement.trainer.gpus to 1"
        )
    source, model = _read(folder, trainer, ranks)
    if ranks.experts is not None:
        check_has_experts(model, ranks.experts.size)
    if source is not None:
        LanguageModel(source).check_head()
        LanguageModel(source).check_rows()
        if trainer.packing:
            LanguageModel(source).check_packing()
        if trainer.prefix_sharing:
            LanguageModel(source).check_sharing()
    if trainer.lora is not None:
        for one in {id(one): one for one in (source, model) if one is not None}.values():
            add_adapters(one, trainer.lora, config.run.seed)
        torch.manual_seed(config.run.seed + ranks.rank)  # for the adapters' dropout
    if not trainer.compile:
        dtype, moe = getattr(torch, trainer.compute_dtype), trainer.moe
        needed = bool(moe.router_replay or moe.load_balancing)
        route_experts(model, moe, dtype, needed, like=lambda: empty_model(folder))
    wrap_layers(model, trainer)
    return _placed(model, source, trainer, ranks)


def frozen_model(
    config: Config,
    folder: Path,
    ranks: Ranks,
    dtype: str = "float32",
    adapt: Callable[[Any], None] | None = None,
) -> Any:
    """Return a folder's frozen model, placed like the trained model.

    Its weights are kept in `dtype`. `adapt` wraps layers in place, before weights are sharded.
    Raises `UnsupportedHead`.
    """
    source, model = _read(folder, config.trainer, ranks)
    if source is not None:
        LanguageModel(source).check_head()
        LanguageModel(source).check_rows()
    if adapt is not None:
        for one in {id(one): one for one in (source, model) if one is not None}.values():
            adapt(one)
    converted(model, getattr(torch, dtype))
    return _placed(model.requires_grad_(False), source, config.trainer, ranks)


def _read(folder: Path, trainer: TrainerConfig, ranks: Ranks) -> tuple[Any | None, Any]:
    """Return the loaded weights (None on ranks that do not read them) and the model to train."""
    if not trainer.sharded:
        source = model = load_model(folder, trainer.attention)
    else:
        source = load_model(folder) if ranks.rank == 0 else None
        model = empty_model(folder, trainer.attention)
    if trainer.packing and trainer.attention == "sdpa":
        _attend_by_sequences(folder, [one for one in (source, model) if one is not None])
    if ranks.context is not None:
        _check_context(folder, model, ranks.context)
    if ranks.experts is not None:
        check_experts(model, ranks.size)
    return source, model


def _check_context(folder: Path, model: Any, context: ContextGroup) -> None:
    """Raise `UnfitModel` where the ranks of a context cannot divide a model's forwards."""
    if model.config._attn_implementation != PACKED:
        raise UndividedContext(type(model).__name__, context.size)
    for call in attention_of(folder)[0] or ():
        check_heads(type(model).__name__, context.size, call.heads, call.key_heads)


def _attend_by_sequences(folder: Path, models: list[Any]) -> None:
    """Let packed rows be computed by sequences; say so where only dense masks know the model."""
    from composer_mesh.actors.models.packed_attention import computes_by_sequences

    if computes_by_sequences(attention_of(folder)[0], layer_kinds(models[0].config)):
        for model in models:
            model.set_attn_implementation(PACKED)
    else:
        logger.warning(
            "packed rows of %s have dense masks, whose memory grows with the square of a row: some "
            "of its layers hand no window or no arguments to an attention function",
            type(models[0]).__name__,
        )


def wrap_layers(model: Any, trainer: TrainerConfig) -> None:
    """Let the decoder layers report progress, and compile, checkpoint or offload them, in place."""
    by_layer = trainer.compile or trainer.checkpoints_layers
    try:
        layers = decoder_layers(model)
    except UnknownLayers:
        if by_layer:
            raise
        return  # its forwards report progress as a whole
    for number, layer in enumerate(layers, start=1):
        layer.register_forward_hook(partial(_report, f"layer {number} of {len(layers)}"))
    if not by_layer:
        return
    latest: list[weakref.ref[HostCopy]] = []
    for layer in layers:
        if trainer.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if trainer.activation_offload:
            layer.forward = partial(_offloaded, layer.forward, latest)
        elif trainer.checkpoints_layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _report(layer: str, _module: Any, _inputs: Any, output: Any) -> None:
    """Report the progress of a layer's forward, and of its backward once its output has a gradient.

    A microbatch of a long context may take longer than a deadline.
    """
    made_progress(f"the forward of {layer}")
    states = output[0] if isinstance(output, tuple) else output
    if isinstance(states, Tensor) and states.requires_grad:
        states.register_hook(lambda _: made_progress(f"the backward down to {layer}"))


class HostCopy:
    """A tensor in the host's memory. With CUDA it is pinned, and copied on a stream of its own.

    Fetching it back begins to fetch the one `before` it, which the backward needs next.
    """

    def __init__(self, states: Tensor, before: "weakref.ref[HostCopy] | None") -> None:
        self._device, self._before = states.device, before
        self._stream = _copies_of(states.device) if states.is_cuda else None
        self._host = torch.empty_like(states, device="cpu", pin_memory=states.is_cuda)
        self._fetched: Tensor | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            states.record_stream(self._stream)
        with self._copying():
            self._host.copy_(states, non_blocking=True)

    def fetch(self) -> Tensor:
        """Begin to copy it to the device, unless that has begun."""
        if self._fetched is None:
            with self._copying():
                self._fetched = self._host.to(self._device, non_blocking=True)
        return self._fetched

    def take(self) -> Tensor:
        """Return it on the device, for the current stream; it is not held there any more."""
        found, self._fetched = self.fetch(), None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            found.record_stream(current)
        if self._before is not None and (before := self._before()) is not None:
            before.fetch()
        return found

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _copies_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _offloaded(
    forward: Any, latest: "list[weakref.ref[HostCopy]]", states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer whose input waits for the backward in the host's memory, and nothing else.

    Only the backward's second forward reads the copy, so that gradients pass to all arguments.
    `latest` is the copy of the layer before.
    """
    if not torch.is_grad_enabled():
        return forward(states, *args, **kwargs)
    learns, first = states.requires_grad, [states]
    copy = HostCopy(states.detach(), latest[0] if latest else None)
    latest[:] = [weakref.ref(copy)]
    del states

    def run() -> Any:
        if first:
            return forward(first.pop(), *args, **kwargs)
        return forward(copy.take().detach().requires_grad_(learns), *args, **kwargs)

    return checkpoint(run, use_reentrant=False)


def _placed(model: Any, source: Any | None, trainer: TrainerConfig, ranks: Ranks) -> Any:
    if ranks.context is not None:
        setattr(model, CONTEXT, ranks.context)
    if not trainer.sharded:
        return model.to(ranks.device)
    mesh, dtype = ranks.mesh(), getattr(torch, trainer.compute_dtype)
    apart = list(adapter_weights(model).values())
    if ranks.experts is not None:
        apart += divide_experts(model, mesh, ranks.experts, dtype)
    shard(model, mesh, dtype, apart)
    model.to_empty(device=ranks.device)
    remember_weights(model)
    _fill(model, source)
    if source is not None:
        model.generation_config = source.generation_config
    with torch.no_grad():
        LanguageModel(model).hidden([[0]])  # FSDP2 can release weights only after a first forward
    release(model)
    return model


@torch.no_grad()
def _fill(model: Any, source: Any | None) -> None:
    """Copy the weights and the non-persistent buffers of a loaded model into another one."""
    if not is_sharded(model):
        assert source is not None
        model.load_state_dict(source.state_dict())
        return
    broadcast_into(_tensors(model), {} if source is None else _tensors(source))


def _tensors(model: Any) -> dict[str, Tensor]:
    return {**dict(model.named_buffers()), **own_weights(model)}


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
