"""Metrics of the log-prob mismatch between trainer and sampler on the sampled tokens.

    d = trainer's log-prob - sampler's log-prob, of one sampled token, in nats

Tokens are drawn from the sampler, so means over them are expectations under the sampler: mean(-d),
the k1 estimate, and mean(exp(d) - 1 - d), the k3 estimate, both estimate KL(sampler || trainer).
With the same weights on both sides, d is the numerical difference of the two engines; for a token
of an older version, d also contains the policy's change since then.

Over microbatches and ranks, sums are added and maxima are reduced with max.

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
    """Sums over tokens and maxima, by name; they stay on their device until they are read."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Tensor], largest: Mapping[str, Tensor]) -> None:
        """Accumulate one microbatch."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in largest.items():
            before = self.largest.get(name, value)
            self.largest[name] = torch.maximum(before, value)

    def on_cpu(self) -> "Sums":
        """Return a copy on the CPU, to send to other ranks. Synchronizes with the accelerator."""
        return Sums(
            {name: value.cpu() for name, value in self.sums.items()},
            {name: value.cpu() for name, value in self.largest.items()},
        )

    @classmethod
    def joined(cls, parts: Iterable["Sums"]) -> "Sums":
        """Return the total over all ranks."""
        total = cls()
        for part in parts:
            total.add(part.sums, part.largest)
        return total


class LogprobMismatch:
    """Accumulates the differences of one step over microbatches; `bound` is in nats."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.sums = Sums()

    def note(self, logprobs: Tensor, sampling: Tensor, mask: Tensor, current: Tensor) -> None:
        """Accumulate the masked tokens; `current` is True at tokens of the trained version.

        All are [B, T]. Differences beyond 80 nats and NaN count as 80: seen, but finite.
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

    def note_without_replay(self, logprobs: Tensor, sampling: Tensor, mask: Tensor) -> None:
        """Accumulate the masked tokens as computed with the experts of the trainer's own choice."""
        self._note("without_replay/", differences(logprobs, sampling, mask), mask)

    def note_weights(self, weights: Tensor, unbounded: Tensor, mask: Tensor) -> None:
        """Accumulate the correction weights of these tokens, with and without their bounds."""
        weights, unbounded = selected(weights, mask).double(), selected(unbounded, mask).double()
        sums = {
            "weight/tokens": mask.sum(),
            "weight/mean": weights.sum(),
            "weight/square": weights.square().sum(),
            "weight/bounded": (weights != unbounded).sum(),
        }
        self.sums.add(sums, {})


def differences(logprobs: Tensor, sampling: Tensor, mask: Tensor) -> Tensor:
    """Return d in float64 under the mask, clamped to +-80 nats, 0 elsewhere."""
    now, then = (selected(one.detach().double(), mask) for one in (logprobs, sampling))
    found = (now - then).nan_to_num(nan=LOG_RATIO_LIMIT)
    return found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def figures(total: Sums) -> Figures:
    """Return the metrics `logprob_mismatch/…` of a step, without those that have no tokens."""
    sums = {name: float(value) for name, value in total.sums.items()}
    found = _means(sums, total, "") | _means(sums, total, "same_version/")
    found |= _means(sums, total, "without_replay/")
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
