"""Which part of an update made its gradient nan or infinite: found out after the update failed.

Each part of an update, a microbatch or some pairs, leaves its channels' losses, and whether the
gradient at the model's last states was finite. They are read only after a failure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from composer_mesh.rollouts.batches import PairSample, PolicySample

MOST_NAMED = 16
"""Rollouts, and pairs, that an error names; the batch itself is in the run's store."""


@dataclass(frozen=True)
class Part:
    """A part of an update: its name, its rollouts with their groups, and its pairs."""

    name: str
    rollouts: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    pairs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, samples: Sequence[PolicySample] = (), pairs: Sequence[PairSample] = ()
    ) -> "Part":
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
    part: Part

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
    """What the parts of one update left on one rank."""

    _losses: dict[str, NotFinite] = field(default_factory=dict)
    _gradients: list[tuple[Part, Tensor]] = field(default_factory=list)

    def watch(self, part: Part, states: Tensor) -> None:
        """Note whether the gradient at a part's last states is finite, once it is computed."""
        if states.requires_grad:
            states.register_hook(lambda grad: self._gradients.append((part, _finite(grad))))

    def note(self, part: Part, losses: Mapping[str, float]) -> None:
        """Note the channels whose sum of losses is not finite after this part, and was before."""
        for channel, loss in losses.items():
            if channel not in self._losses and not math.isfinite(loss):
                self._losses[channel] = NotFinite(f"the {channel} loss is {loss:g}", part)

    def found(self) -> list[NotFinite]:
        """Return the losses that are not finite, or else the first gradient that is not."""
        if self._losses:
            return list(self._losses.values())
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
