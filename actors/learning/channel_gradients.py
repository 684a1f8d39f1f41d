"""Gradients of an update kept apart by channel, to measure and to bound each channel's share.

An update that is not measured has one backward for all channels, as if this file were not there.
A measured one has a backward for each channel with data in a microbatch, through one forward, and
takes memory for the gradients of each. The total is the sum of the parts, so it differs from that
of one backward by float32 rounding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor, is_sharded, keep_head
from composer_mesh.channels.step import POLICY, StepLoss
from composer_mesh.channels.weights import FREE, bounded_factors, update_bounds, update_shares
from composer_mesh.configs.schema import Config

Gradients = list[Tensor | None]


class ChannelGradients:
    """Owns the gradients of a model's weights from the first backward of an update to its end.

    All ranks measure the same updates. Those of a sharded model run equally many backwards for
    each channel, whatever data they have.
    """

    def __init__(
        self, model: Any, weights: Mapping[str, Tensor], config: Config, ranks: Ranks
    ) -> None:
        self._model, self._ranks, self._sharded = model, ranks, is_sharded(model)
        self._weights: Sequence[Any] = list(weights.values())
        self._every = config.trainer.update_share_every
        self._bounds = update_bounds(config)
        self._peaks = {name: one.peak for name, one in config.weighted_channels.items()}
        self._current_bounds: dict[str, tuple[float, float]] = {}
        sections, own = config.weighted_channels.items(), config.own_updates
        self._channels = [POLICY, *(n for n, one in sections if one.on and n not in own)]
        self._apart: dict[str, Gradients] | None = None
        self.norms: dict[str, float] = {}
        """Norms of the channels' gradients in the last update that was measured."""
        if self._bounds or self._every:
            # What is compiled later gives its buffers away in the backward, unless this is set.
            torch._functorch.config.donated_buffer = False

    def measures(self, step: int) -> bool:
        """Whether the updates of a step (0-based) are measured: all of them if there are bounds."""
        return bool(self._bounds) or (self._every > 0 and step % self._every == 0)

    def begin(self, step: int, channel_weights: Mapping[str, float], measured: bool = True) -> None:
        """Forget what an aborted update left; its gradients are cleared by the caller.

        A channel's own update is not `measured`.

        `channel_weights` are those of the step. Where a schedule has lowered one, the channel's
        bounds are lowered by the same factor.
        """
        self._apart, self.norms = None, {}
        factors = {name: channel_weights[name] / self._peaks[name] for name in self._bounds}
        self._current_bounds = {
            name: (low * factors[name], high * factors[name] if high < FREE[1] else high)
            for name, (low, high) in self._bounds.items()
            if factors[name] > 0
        }
        if measured and self.measures(step):
            self._apart = {name: [None] * len(self._weights) for name in self._channels}

    def backward(self, losses: StepLoss, states: Tensor | None = None) -> None:
        """Add the gradients of a microbatch: with one backward, or with one for each channel.

        `states` are those of the forward that the losses have in common.
        """
        if self._apart is None:
            losses.total().backward()
            return
        parts = losses.by_channel()
        if self._sharded:
            zero = _zero(losses, states)
            parts = {n: zero + parts[n] if n in parts else zero for n in self._channels}
        left = len(parts)
        for name, loss in parts.items():
            left -= 1
            keep_head(self._model, left > 0)
            with self.of(name):
                loss.backward(retain_graph=left > 0)

    @contextmanager
    def of(self, channel: str) -> Iterator[None]:
        """Count the gradients of a `with` block to a channel."""
        if self._apart is None:
            yield
            return
        self._show(self._apart[channel])
        yield
        self._apart[channel] = [one.grad for one in self._weights]
        self._show([None] * len(self._weights))

    @torch.no_grad()
    def finish(self) -> dict[str, float] | None:
        """Leave the update's gradients, summed over ranks, on the weights; return their figures.

        Returns None for an update that is not measured, whose gradients are left as they are.
        Collective. Norms that are not finite are left to the update, which refuses them.
        """
        if self._apart is None:
            return None
        norms = self._ranks.gather({name: self._summed(name) for name in self._channels})[0]
        self.norms = norms
        factors = dict.fromkeys(norms, 1.0)
        finite = all(map(math.isfinite, norms.values()))
        if self._bounds and finite:
            factors = bounded_factors(norms, self._current_bounds)
        parts = [(factors[name], self._apart[name]) for name in self._channels]
        self._show([_combined(place, parts) for place in range(len(self._weights))])
        self._apart = None
        return self._figures(norms, factors) if finite else {}

    def _summed(self, channel: str) -> float:
        """Sum a channel's gradients over ranks, and return their norm."""
        assert self._apart is not None
        self._show(self._apart[channel])
        self._ranks.sum_gradients(one for one in self._weights if not is_dtensor(one))
        found = self._apart[channel] = [one.grad for one in self._weights]
        self._show([None] * len(self._weights))
        norm: Any = torch.nn.utils.get_total_norm([one for one in found if one is not None])
        return float(norm.full_tensor() if is_dtensor(norm) else norm)

    def _figures(
        self, norms: Mapping[str, float], factors: Mapping[str, float]
    ) -> dict[str, float]:
        shares = update_shares({name: factors[name] * norm for name, norm in norms.items()})
        return {
            **{f"update/norm_{name}": norm for name, norm in norms.items()},
            **{f"update/share_{name}": share for name, share in shares.items()},
            **{f"update/scale_{name}": factors[name] for name in self._bounds},
        }

    def _show(self, gradients: Gradients) -> None:
        for weights, gradient in zip(self._weights, gradients, strict=True):
            weights.grad = gradient


def _combined(place: int, parts: Sequence[tuple[float, Gradients]]) -> Tensor | None:
    """Return the sum of the channels' gradients of a weight, which takes the memory of the first.

    None if no channel has one.
    """
    total: Tensor | None = None
    for factor, gradients in parts:
        gradient = gradients[place]
        if gradient is None:
            continue
        if total is None:
            total = gradient if factor == 1 else gradient.mul_(factor)
        else:
            total = total.add_(gradient, alpha=factor)
        gradients[place] = None
    return total


def _zero(losses: StepLoss, states: Tensor | None) -> Tensor:
    """Return a zero whose backward passes through every forward of the microbatch."""
    of_states = [] if states is None else [states.sum()]
    return 0 * torch.stack([*of_states, *losses.others]).sum()
