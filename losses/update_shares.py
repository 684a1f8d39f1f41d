"""Shares of the channels in an update, and the factors that keep them within bounds.

Plain numbers: the norm of each channel's gradient, weighted as it is in the total.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

FREE = (0.0, 1.0)
"""Bounds of a channel that has none."""

Bounds = Mapping[str, tuple[float, float]]
"""Lowest and highest share of channels, by name."""


def update_shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Each channel's norm over the sum of all; nothing where all are 0, as no share is defined."""
    total = math.fsum(norms.values())
    return {name: norm / total for name, norm in norms.items()} if total else {}


def bounded_factors(norms: Mapping[str, float], bounds: Bounds) -> dict[str, float]:
    """Return the factor of each channel's gradient that brings its share within its bounds.

        norm'_c = clip(norm_c, low_c * T, high_c * T),   T = sum of norm'_c

    So a gradient is raised only to its lower bound and lowered only to its upper one, and all
    others stay as they are. T is unique where a channel without bounds, such as the policy, has a
    norm above 0; where none has, nothing is rescaled, since the shares then have nothing to be
    shares of. A channel whose norm is 0 cannot be raised, and keeps the factor 1.

    Raises ValueError for a norm that is not finite, and for bounds that no shares can keep.
    """
    _check(norms, bounds)
    bounded = {name: bounds[name] for name in norms if name in bounds and norms[name] > 0}
    factors = dict.fromkeys(norms, 1.0)
    free = math.fsum(norm for name, norm in norms.items() if name not in bounds)
    if not bounded or not free:
        return factors
    total = _total(free, [_Bounded(norms[name], *ends) for name, ends in bounded.items()])
    for name, (low, high) in bounded.items():
        norm = norms[name]
        factors[name] = min(max(norm, low * total), high * total) / norm
    return factors


@dataclass(frozen=True)
class _Bounded:
    """A channel with a norm above 0 and its bounds."""

    norm: float
    low: float
    high: float

    def at(self, total: float) -> float:
        """Return the share of a total that it has within its bounds."""
        return min(max(self.norm / total, self.low), self.high)

    @property
    def turns(self) -> list[float]:
        """The totals at which a bound begins to hold."""
        return [self.norm / end for end in (self.high, self.low) if end]


def _total(free: float, channels: list[_Bounded]) -> float:
    """Solve free / T + sum of shares at T = 1, whose left side falls from infinity.

    Between two totals at which a bound begins to hold each channel is either at a bound or free, so
    that the solution of that piece is a division.
    """
    turns = sorted({turn for one in channels for turn in one.turns})
    for low, high in pairwise([0.0, *turns, math.inf]):
        if high < math.inf and free / high + math.fsum(one.at(high) for one in channels) > 1:
            continue
        inside = 2 * low + 1 if high == math.inf else (low + high) / 2
        at_bounds, moving = 0.0, free
        for one in channels:
            if one.low < one.norm / inside < one.high:
                moving += one.norm
            else:
                at_bounds += one.at(inside)
        return moving / (1 - at_bounds)
    raise AssertionError("the last piece has a solution")


def _check(norms: Mapping[str, float], bounds: Bounds) -> None:
    for name, norm in norms.items():
        if not (math.isfinite(norm) and norm >= 0):
            raise ValueError(
                f"the norm of {name} is {norm} but has to be finite and >= 0: lower the learning "
                "rate, or look for a loss that is not finite"
            )
    for name, (low, high) in bounds.items():
        if not (0 <= low <= high <= 1 and high > 0):
            raise ValueError(
                f"the bounds of {name} are {low} and {high} but have to be shares, the lower one "
                "first and the upper one above 0: correct them"
            )
    if (least := math.fsum(low for low, _ in bounds.values())) >= 1:
        raise ValueError(
            f"the lower bounds add up to {least}, which leaves the other channels nothing: lower "
            "them to less than 1 together"
        )
