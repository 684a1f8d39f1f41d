"""The end of an optimizer step: gradients of all ranks are clipped and applied.

Gradients of sharded weights are already summed by the backward pass; those of weights that every
rank holds completely, such as adapters, are summed here. Where the norm of the gradient is not
finite, the parts of the update, microbatches or some pairs, tell which of them made it so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from composer_mesh.actors.models.backend import Optimizers, optimizers_of
from composer_mesh.actors.models.optimizer_state import (
    CPU,
    OffloadedOptimizers,
    StoredOptimizerState,
    check_weights,
    optimizer_state_of,
    restore_optimizer_state,
    state_tensors,
)
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor, local
from composer_mesh.channels.weights import share_done, share_of_peak
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.rollouts.batches import PairSample, PolicySample


class NormNotFinite(ArithmeticError):
    """The norm of an update's gradient, and its learning rate."""

    def __init__(self, norm: float, rate: float) -> None:
        super().__init__(norm, rate)
        self.norm, self.rate = norm, rate


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of a run of `steps`."""
    done = share_done(config.warmup_steps, step, steps)
    return config.lr * share_of_peak(
        config.lr_schedule, config.warmup_steps, config.min_lr_ratio, step, done
    )


class WeightUpdate:
    """The optimizers of a model's trainable weights, the config's unless others are made."""

    def __init__(
        self, model: Any, config: Config, ranks: Ranks, make: Optimizers | None = None
    ) -> None:
        trainer = config.trainer
        self._config, self._ranks, self._steps = trainer, ranks, config.run.steps
        # Stored now, as a sharded model exposes other tensors during a forward.
        self._weights = {n: one for n, one in model.named_parameters() if one.requires_grad}
        optimizers = (make or partial(optimizers_of, trainer))(self._weights)
        self._optimizers = list(optimizers)
        self._offloaded: OffloadedOptimizers | None = None
        if trainer.optimizer_offload:
            self._offloaded = OffloadedOptimizers(self._optimizers, ranks.device)
        groups = [group for one in self._optimizers for group in one.param_groups]
        self._rates = [(group, _share(group["lr"], trainer.lr)) for group in groups]
        self._updated = False

    def begin(self) -> None:
        """Clear all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def apply(
        self,
        step: int,
        before_update: Callable[[], object],
        summed: bool = False,
        share: float = 1.0,
    ) -> tuple[float, float]:
        """Update the weights after `before_update` returns; return gradient norm and learning rate.

        `summed` gradients are already those of all ranks. The rate is a `share` of the schedule's.
        Raises `NormNotFinite` before any weight is changed, and `UnsupportedState` for an optimizer
        whose state is not of tensors.
        """
        weights = list(self._weights.values())
        if not summed:
            self._ranks.sum_gradients(one for one in weights if not is_dtensor(one))
        total: Any = torch.nn.utils.clip_grad_norm_(weights, self._config.grad_clip)
        norm = float(total.full_tensor() if is_dtensor(total) else total)
        rate = share * learning_rate(self._config, step, self._steps)
        if not math.isfinite(norm):
            raise NormNotFinite(norm, rate)
        for group, of_group in self._rates:
            if isinstance(group["lr"], Tensor):  # as compiled updates need it
                group["lr"].fill_(of_group * rate)
            else:
                group["lr"] = of_group * rate
        before_update()
        self._step()
        if not self._updated:
            self.optimizer_state()  # raises for one that no checkpoint could store
        self._updated = True
        return norm, rate

    def _step(self) -> None:
        if self._offloaded is not None:
            self._offloaded.step()
            return
        for optimizer in self._optimizers:
            optimizer.step()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable weights by name."""
        return self._weights

    def device_state(self) -> list[Tensor]:
        """Return the tensors of the optimizers' state that stay on the device between updates."""
        if self._offloaded is not None:
            return []
        return [state for one in self._optimizers for *_, state in state_tensors(one)]

    def not_finite(self) -> int:
        """Return how many numbers of this rank's weights are nan or infinite."""
        return sum(int((~local(one).isfinite()).sum()) for one in self._weights.values())

    def trained(self) -> list[str]:
        """Return the names of the trainable weights."""
        return list(self._weights)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer state; shares its memory."""
        return optimizer_state_of(self._weights, self._optimizers)

    def restore(self, trained: list[str], optimizer_state: StoredOptimizerState) -> None:
        """Restore the optimizer state of weights with these names; raises `StateOfOtherWeights`."""
        check_weights(self._weights, trained)
        device = None if self._offloaded is None else CPU
        restore_optimizer_state(self._weights, self._optimizers, optimizer_state, device)
        if self._offloaded is not None:
            self._offloaded.pin()


def _share(rate: float | Tensor, peak: float) -> float:
    """Return a group's rate as a share of `trainer.lr`, in the precision of the group's rate."""
    if isinstance(rate, Tensor):
        return float(rate / torch.tensor(peak, dtype=rate.dtype, device=rate.device))
    return rate / peak


MOST_NAMED = 16
"""Rollouts, and pairs, that an error names; the batch itself is in the run's store."""


@dataclass(frozen=True)
class UpdatePart:
    """A part of an update: its name, its rollouts with their groups, and its pairs."""

    name: str
    rollouts: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    pairs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, samples: Sequence[PolicySample] = (), pairs: Sequence[PairSample] = ()
    ) -> "UpdatePart":
        """Return the part that computes some samples and pairs."""
        return cls(
            name,
            tuple(one.trace_id for one in samples),
            tuple(dict.fromkeys(one.group_id for one in samples)),
            tuple(one.pair_id for one in pairs),
        )

    def __str__(self) -> str:
        named = [_named("rollouts", self.rollouts), _named("pairs", self.pairs)]
        return f"{self.name} ({'; '.join(filter(None, named)) or 'no rollouts'})"


@dataclass(frozen=True)
class NotFinite:
    """A value that is not finite, and the first part of an update that has it."""

    what: str
    part: UpdatePart

    def __str__(self) -> str:
        return f"{self.what} in {self.part}"


class GradientNotFinite(RuntimeError):
    """An update whose gradient has a norm of nan or infinity; it changed no weight.

    `found` are the values that were not finite before, in the order of ranks; `channels` the norms
    of the channels' gradients, where the update was measured; `weights` counts the weights that
    were not finite already. Repeating the step would fail in the same way.
    """

    failure_class: ClassVar[str] = "code"

    def __init__(
        self,
        step: int,
        norm: float,
        rate: float,
        weights: int,
        channels: Mapping[str, float],
        found: Sequence[NotFinite],
    ) -> None:
        super().__init__(step, norm, rate, weights, channels, found)
        self.step, self.norm, self.rate, self.weights = step, norm, rate, weights
        self.channels, self.found = dict(channels), list(found)

    def __str__(self) -> str:
        return (
            f"step {self.step + 1} was not trained: the norm of its gradient is {self.norm:g} at "
            f"learning rate {self.rate:g}: {self._why()}. This update changed no weight, and the "
            f"batch is kept as step {self.step + 1} in the run's store. Look at the rollouts with "
            "`composer-mesh traces`, and at policy/grad_norm of the steps before; then lower "
            "trainer.lr or trainer.grad_clip, and train again from an earlier checkpoint"
        )

    def _why(self) -> str:
        if self.weights:
            return f"{self.weights} weights of version {self.step} are not finite already"
        if self.found:
            return "; ".join(map(str, self.found))
        bad = [name for name, norm in self.channels.items() if not math.isfinite(norm)]
        by = f" of the channels {', '.join(bad)}" if bad else ""
        return (
            f"the losses and their gradients at the model's last states are finite, so a layer's "
            f"backward{by} overflowed"
        )

    def fields(self) -> dict[str, object]:
        """Return the evidence for an event, as JSON values."""
        return {
            "step": self.step + 1,
            "lr": self.rate,
            "weights_not_finite": self.weights,
            "found": [str(one) for one in self.found],
            "rollouts": sorted({name for one in self.found for name in one.part.rollouts}),
            "groups": sorted({group for one in self.found for group in one.part.groups}),
            "pairs": sorted({name for one in self.found for name in one.part.pairs}),
        }


@dataclass
class FiniteChecks:
    """What the parts of one update left on one rank; it is read only after a failure."""

    _losses: list[tuple[UpdatePart, dict[str, Any]]] = field(default_factory=list)
    _gradients: list[tuple[UpdatePart, Tensor]] = field(default_factory=list)

    def watch(self, part: UpdatePart, states: Tensor) -> None:
        """Note whether the gradient at a part's last states is finite, once it is computed."""
        if states.requires_grad:
            states.register_hook(lambda grad: self._gradients.append((part, _finite(grad))))

    def note(self, part: UpdatePart, losses: Mapping[str, Any]) -> None:
        """Note the sums of the channels' losses after a part, numbers or tensors."""
        self._losses.append((part, dict(losses)))

    def found(self) -> list[NotFinite]:
        """Return the losses that are not finite, or else the first gradient that is not.

        Of each channel, the first part after which the sum of its losses is not finite.
        """
        bad_losses: dict[str, NotFinite] = {}
        for part, losses in self._losses:
            for channel, loss in losses.items():
                if channel not in bad_losses and not math.isfinite(loss):
                    bad_losses[channel] = NotFinite(f"the {channel} loss is {float(loss):g}", part)
        if bad_losses:
            return list(bad_losses.values())
        bad = (part for part, finite in self._gradients if not bool(finite))
        return [
            NotFinite("the gradient at the model's last states is not finite", part)
            for part in list(bad)[:1]
        ]


def _finite(gradient: Tensor) -> Tensor:
    return gradient.detach().isfinite().all()


def _named(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{kind} {', '.join(names[:MOST_NAMED])}{more}" if names else ""
