"""Reads and sets the experts that a mixture's routers choose, in any model of transformers.

A router, however it scores, takes the best experts of each token by `torch.topk`. There its choices
are noted, or replaced by given ones, whose scores stay those of the model, with their gradients.

    model(..., expert_routing=routing) -> each layer -> its router -> topk

Layers get the routing as an argument, so that a checkpointed layer computes the same again in the
backward. Axes: N positions of a forward, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composer_mesh.actors.models.expert_parallel import ContextGroup
from composer_mesh.planning.model_refusals import UnsupportedRouting
from composer_mesh.rollouts.traces import ExpertChoices

KEYWORD = "expert_routing"
"""The keyword by which a model's forward takes an `ExpertRouting`."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk")
"""What configs call the number of experts, and that of a token's experts."""
ROUTERS = "expert_routers"
logger = logging.getLogger(__name__)
PROBE_IDS = 3
TOPK = (torch.topk, Tensor.topk)


class ExpertRouting:
    """The experts of one forward: `given` [N, L, K], -1 where the model chooses; else its own.

    `real` [N] is False at padding, which balances nothing; None if there is none. Where the ranks
    of a `context` divide the positions, N are this rank's, and sums are over those of all.
    """

    def __init__(
        self,
        given: Tensor | None = None,
        real: Tensor | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        self.given, self.real, self._context = given, real, context
        self.chosen: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}
        self.rerouted: dict[int, Tensor] = {}

    def all_chosen(self) -> Tensor:
        """Return the experts [N, L, K] that every layer computed with."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], dim=1)

    def choose(self, layer: int, scores: Tensor, found: Any) -> Any:
        """Return the scores and numbers of a layer's experts: those given, else those `found`."""
        if self.given is None:
            self.chosen[layer] = found.indices
            return found
        given = self.given[:, layer].to(scores.device)
        free = given < 0
        chosen = torch.where(free, found.indices, given)
        self.chosen[layer] = chosen
        same = (given[:, :, None] == found.indices[:, None]).any(-1)
        self.rerouted[layer] = (~same & ~free).sum()
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def rerouted_choices(self) -> int:
        """Return how many of the given experts are not those that the model had chosen."""
        return int(self._summed(torch.stack(list(self.rerouted.values())).sum()))

    def _summed(self, part: Tensor) -> Tensor:
        return part if self._context is None else self._context.summed(part)

    def balance_loss(self) -> Tensor:
        """Return the load-balancing loss, summed over layers: 1 for each if experts are equal.

        E times the sum over experts of their share of choices and their mean probability (Switch
        Transformer, equations 4 to 6), with the choices of all K ranks counted together.
        """
        losses = [self._balance(layer) for layer in sorted(self.logits)]
        return torch.stack(losses).sum()

    def _balance(self, layer: int) -> Tensor:
        logits, chosen = self.logits[layer], self.chosen[layer]
        weights = torch.ones(len(logits), device=logits.device)
        if self.real is not None:
            weights = self.real.to(weights)
        count = self._summed(weights.sum()).clamp(min=1)
        experts = logits.shape[-1]
        picked = weights.new_zeros(experts).index_add_(
            0, chosen.flatten(), weights.repeat_interleave(chosen.shape[1])
        )
        shares = self._summed(picked) / (count * chosen.shape[1])
        probabilities = (logits.float().softmax(-1) * weights[:, None]).sum(0)
        probabilities = self._summed(probabilities) / count
        return experts * (shares * probabilities).sum()


class _Current(threading.local):
    """The routing of the layer that this thread computes; backwards have their own threads."""

    routing: ExpertRouting | None = None


_current = _Current()


class _Router(TorchFunctionMode):
    """Intercepts what a router computes: its logits and its choice."""

    def __init__(
        self, layer: int, sizes: tuple[int, int], float32: bool, routing: ExpertRouting | None
    ) -> None:
        super().__init__()
        self._layer, self._sizes, self._float32 = layer, sizes, float32
        self._routing = routing

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        scores = function is nn.functional.linear and len(args[1]) == self._sizes[0]
        if scores and self._float32:
            args = [one.float() if isinstance(one, Tensor) else one for one in args]
        found = function(*args, **(kwargs or {}))
        if self._routing is None:
            return found
        if scores:
            self._routing.logits.setdefault(self._layer, found.flatten(0, -2))
        if is_choice(function, args, found, self._sizes):
            return self._routing.choose(self._layer, args[0], found)
        return found


def is_choice(function: Any, args: Any, found: Any, sizes: tuple[int, int]) -> bool:
    """Whether a call is a router's: the best K of E scores of each token."""
    if function not in TOPK or args[0].dim() != 2:
        return False
    return (args[0].shape[-1], found.indices.shape[-1]) == sizes


def expert_sizes(config: Any) -> tuple[int, int] | None:
    """Return the number of experts, and of those of a token; None for a dense model."""
    text = config.get_text_config()
    experts, per_token = (
        next((getattr(text, name) for name in names if getattr(text, name, None)), None)
        for names in (EXPERTS, PER_TOKEN)
    )
    return (experts, per_token) if experts and per_token else None


class _Finder(TorchFunctionMode):
    """Notes the names of the innermost modules that choose experts."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self._sizes = sizes
        self.inside: list[str] = []
        self.found: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if is_choice(function, args, found, self._sizes) and self.inside:
            self.found.append(self.inside[-1])
        return found


@torch.no_grad()
def router_names(model: Any) -> list[str]:
    """Return the names of a model's routers, in the order of its layers; it may have no weights."""
    sizes = expert_sizes(model.config)
    if sizes is None:
        return []
    finder = _Finder(sizes)
    if hasattr(model, "set_experts_implementation") and model.device.type == "meta":
        model.set_experts_implementation("batched_mm")
    ids = torch.zeros(1, PROBE_IDS, dtype=torch.long, device=model.device)
    # Given a mask of four axes, transformers makes none, for which it would read numbers.
    mask = torch.ones(1, 1, PROBE_IDS, PROBE_IDS, dtype=torch.bool, device=model.device)
    with _names_noted(model, finder.inside), finder:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return list(dict.fromkeys(finder.found))


@contextmanager
def _names_noted(model: nn.Module, inside: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forward runs in a list, the innermost last."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def intercept_routers(
    model: Any, layers: nn.ModuleList, names: list[str], float32: bool, needed: bool
) -> None:
    """Let a model take `expert_routing=`, in place. `names` are those of its routers.

    With `float32` routers compute their logits in float32. Call it before layers are checkpointed.
    Does nothing to a dense model. Raises `UnsupportedRouting` for a mixture whose routers were not
    found, where they are `needed`.
    """
    sizes, name = expert_sizes(model.config), type(model).__name__
    if sizes is None:
        return
    if not names:
        if needed:
            raise UnsupportedRouting(name, "no router of it was found")
        logger.warning("routers of %s were not found and compute as they are", name)
        return
    for number, name in enumerate(names):
        router = model.get_submodule(name)
        router.forward = partial(_route, router.forward, number, sizes, float32)
    for layer in layers:
        layer.forward = partial(_in_layer, layer.forward)
    setattr(model, ROUTERS, len(names))


def routers_of(model: Any) -> int:
    """Return the number of intercepted routers of a model, 0 for a dense one."""
    return getattr(model, ROUTERS, 0)


def routing_of(
    sequences: Sequence[Sequence[int]],
    experts: Sequence[ExpertChoices | None],
    places: Tensor,
    count: int,
    device: torch.device,
    context: ContextGroup | None = None,
) -> ExpertRouting:
    """Return the routing of a forward over `count` positions, of sequences at `places` [B, T].

    Those of `experts` are given, of the first sequences; the model chooses the others. With a
    `context`, the routing is of this rank's positions.
    """
    own = slice(None) if context is None else context.own(count)
    real = torch.zeros(count, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        real[places[row, : len(sequence)].cpu()] = True
    by_row = {row: one for row, one in enumerate(experts) if one is not None}
    given = None
    if by_row:
        first = next(iter(by_row.values()))
        given = torch.full((count, first.layers, first.per_token), -1)
        for row, one in by_row.items():
            given[places[row, : one.positions].cpu()] = numbers_of(one)
        given = given[own].to(device)
    return ExpertRouting(given, None if bool(real.all()) else real[own].to(device), context)


def numbers_of(choices: ExpertChoices) -> Tensor:
    """Return the numbers of experts [positions, L, K]."""
    kind = torch.uint8 if choices.width == 1 else torch.uint16
    flat = torch.frombuffer(bytearray(choices.contents), dtype=kind)
    return flat.view(choices.positions, choices.layers, choices.per_token).long()


def choices_of(numbers: Tensor, config: Any) -> ExpertChoices:
    """Return numbers of experts [positions, L, K], on the CPU, of a model of this config."""
    sizes = expert_sizes(config)
    width = 1 if sizes is not None and sizes[0] <= 1 << 8 else 2
    kind = torch.uint8 if width == 1 else torch.uint16
    layers, per_token = numbers.shape[1:]
    contents = numbers.to(kind).contiguous().numpy().tobytes()
    return ExpertChoices(layers, per_token, width, contents)


def _in_layer(forward: Any, *args: Any, **kwargs: Any) -> Any:
    outer, _current.routing = _current.routing, kwargs.pop(KEYWORD, None)
    try:
        return forward(*args, **kwargs)
    finally:
        _current.routing = outer


def _route(
    forward: Any,
    layer: int,
    sizes: tuple[int, int],
    float32: bool,
    states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a router; the scores that it returns have the dtype of its input, as without float32."""
    with _Router(layer, sizes, float32, _current.routing):
        found = forward(states, *args, **kwargs)
    if not float32 or not isinstance(found, tuple):
        return found
    return tuple(
        one.to(states.dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in found
    )
