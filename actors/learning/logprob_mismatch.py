"""How far the trainer's log-probs are from those with which the same tokens were sampled.

    d = trainer's log-prob - sampler's log-prob, of one sampled token, in nats

Tokens are taken from the sampler, so means over them are expectations under the sampler: mean(-d),
the k1 estimate, and mean(exp(d) - 1 - d), the k3 estimate, are both of KL(sampler || trainer). With
the same weights on both sides d is what the two engines compute differently; a token of an older
version has in its d also what the policy has learnt since.

Sums of microbatches and ranks add up, a maximum stays one. What is too much is not decided here.

Axes: B sequences of a microbatch, T their padded length.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT, selected

Figures = dict[str, float]


@dataclass
class Sums:
    """Sums over tokens, and largest values, by name; where the tensors are until they are read."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Tensor], largest: Mapping[str, Tensor]) -> None:
        """Take in one microbatch."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in largest.items():
            before = self.largest.get(name, value)
            self.largest[name] = torch.maximum(before, value)

    def on_cpu(self) -> "Sums":
        """The same where it can be sent to other ranks. Waits for the accelerator."""
        return Sums(
            {name: value.cpu() for name, value in self.sums.items()},
            {name: value.cpu() for name, value in self.largest.items()},
        )

    @classmethod
    def joined(cls, parts: Iterable["Sums"]) -> "Sums":
        """Those of all ranks."""
        total = cls()
        for part in parts:
            total.add(part.sums, part.largest)
        return total


class LogprobMismatch:
    """The differences of one step, microbatch by microbatch; `bound` is in nats."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.sums = Sums()

    def note(self, logprobs: Tensor, sampling: Tensor, mask: Tensor, current: Tensor) -> None:
        """Take in the tokens under the mask; `current` is True at those of the trained version.

        All are [B, T]. What is beyond 80 nats or no number counts as 80: seen, and yet finite.
        """
        difference = differences(logprobs, sampling, mask)
        for prefix, where in (("", mask), ("same_version/", mask & current)):
            self._note(prefix, torch.where(where, difference, 0.0), where)

    def _note(self, prefix: str, difference: Tensor, mask: Tensor) -> None:
        size = difference.abs()
        sums = {
            "tokens": mask.sum(),
            "mean": size.sum(),
            "kl_k1": -difference.sum(),
            "kl_k3": (torch.expm1(difference) - difference).sum(),
            "above": (size > self._bound).sum(),
        }
        largest = {f"{prefix}max": size.amax()} if size.numel() else {}
        self.sums.add({f"{prefix}{name}": value for name, value in sums.items()}, largest)

    def note_weights(self, weights: Tensor, unbounded: Tensor, mask: Tensor) -> None:
        """Take in the correction of these tokens, and what it would be without its bounds."""
        weights, unbounded = selected(weights, mask).double(), selected(unbounded, mask).double()
        sums = {
            "weight/tokens": mask.sum(),
            "weight/mean": weights.sum(),
            "weight/square": weights.square().sum(),
            "weight/bounded": (weights != unbounded).sum(),
        }
        self.sums.add(sums, {})


def differences(logprobs: Tensor, sampling: Tensor, mask: Tensor) -> Tensor:
    """d in float64 under the mask, within +-80 nats, 0 elsewhere."""
    now, then = (selected(one.detach().double(), mask) for one in (logprobs, sampling))
    found = (now - then).nan_to_num(nan=LOG_RATIO_LIMIT)
    return found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def figures(total: Sums) -> Figures:
    """The metrics `logprob_mismatch/…` of a step; none of what no token was noted for."""
    sums = {name: float(value) for name, value in total.sums.items()}
    found = _means(sums, total, "") | _means(sums, total, "same_version/")
    if tokens := sums.get("same_version/tokens"):
        found["same_version/tokens"] = tokens
    if tokens := sums.get("weight/tokens"):
        mean, square = sums["weight/mean"] / tokens, sums["weight/square"] / tokens
        found["weight/mean"] = mean
        found["weight/bounded"] = sums["weight/bounded"] / tokens
        found["weight/effective"] = mean**2 / square if square else 0.0
    return {f"logprob_mismatch/{name}": value for name, value in found.items()}


def _means(sums: Mapping[str, float], total: Sums, prefix: str) -> Figures:
    tokens = sums.get(f"{prefix}tokens")
    if not tokens:
        return {}
    names = [f"{prefix}{name}" for name in ("mean", "kl_k1", "kl_k3", "above")]
    largest = f"{prefix}max"
    return {name: sums[name] / tokens for name in names} | {largest: float(total.largest[largest])}
