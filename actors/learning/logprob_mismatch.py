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

import torch
from torch import Tensor

from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT, selected

Figures = dict[str, float]


Totals = dict[str, Tensor]
"""Sums over tokens, and maxima where a name ends in "max"; on their device until they are read."""


def accumulate(total: Totals, more: Mapping[str, Tensor]) -> None:
    """Add the totals of a microbatch, or of a rank, in place."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        elif name.endswith("max"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


class LogprobMismatch:
    """Accumulates the differences of one step over microbatches; `bound` is in nats."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.totals: Totals = {}

    def note(self, logprobs: Tensor, sampling: Tensor, mask: Tensor, current: Tensor) -> None:
        """Accumulate the masked tokens; `current` is True at tokens of the trained version.

        All are [B, T]. Differences beyond 80 nats and NaN count as 80: seen, but finite.
        """
        difference = differences(logprobs, sampling, mask)
        for prefix, where in (("", mask), ("same_version/", mask & current)):
            self._note(prefix, torch.where(where, difference, 0.0), where)

    def _note(self, prefix: str, difference: Tensor, mask: Tensor) -> None:
        size = difference.abs()
        found = {
            "tokens": mask.sum(),
            "mean": size.sum(),
            "kl_k1": -difference.sum(),
            "kl_k3": (torch.expm1(difference) - difference).sum(),
            "above": (size > self._bound).sum(),
        }
        if size.numel():
            found["max"] = size.amax()
        accumulate(self.totals, {f"{prefix}{name}": value for name, value in found.items()})

    def note_without_replay(self, logprobs: Tensor, sampling: Tensor, mask: Tensor) -> None:
        """Accumulate the masked tokens as computed with the experts of the trainer's own choice."""
        self._note("without_replay/", differences(logprobs, sampling, mask), mask)

    def note_weights(self, weights: Tensor, unbounded: Tensor, mask: Tensor) -> None:
        """Accumulate the correction weights of these tokens, with and without their bounds."""
        weights, unbounded = selected(weights, mask).double(), selected(unbounded, mask).double()
        found = {
            "weight/tokens": mask.sum(),
            "weight/mean": weights.sum(),
            "weight/square": weights.square().sum(),
            "weight/bounded": (weights != unbounded).sum(),
        }
        accumulate(self.totals, found)

    def on_cpu(self) -> Totals:
        """Return the totals on the CPU, to send to other ranks; waits for the accelerator."""
        return {name: value.cpu() for name, value in self.totals.items()}


def differences(logprobs: Tensor, sampling: Tensor, mask: Tensor) -> Tensor:
    """Return d in float64 under the mask, clamped to +-80 nats, 0 elsewhere."""
    now, then = (selected(one.detach().double(), mask) for one in (logprobs, sampling))
    found = (now - then).nan_to_num(nan=LOG_RATIO_LIMIT)
    return found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def figures(ranks: Iterable[Totals]) -> Figures:
    """Return the metrics `logprob_mismatch/…` of a step, without those that have no tokens."""
    total: Totals = {}
    for one in ranks:
        accumulate(total, one)
    sums = {name: float(value) for name, value in total.items()}
    found: Figures = {}
    for prefix in ("", "same_version/", "without_replay/"):
        if tokens := sums.get(f"{prefix}tokens"):
            means = [f"{prefix}{name}" for name in ("mean", "kl_k1", "kl_k3", "above")]
            found |= {name: sums[name] / tokens for name in means}
            found[f"{prefix}max"] = sums[f"{prefix}max"]
    if tokens := sums.get("same_version/tokens"):
        found["same_version/tokens"] = tokens
    if tokens := sums.get("weight/tokens"):
        mean, square = sums["weight/mean"] / tokens, sums["weight/square"] / tokens
        found["weight/mean"] = mean
        found["weight/bounded"] = sums["weight/bounded"] / tokens
        found["weight/effective"] = mean**2 / square if square else 0.0
    return {f"logprob_mismatch/{name}": value for name, value in found.items()}
