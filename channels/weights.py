"""The weights of the channels in each step's total, and the shares of an update that bound them.

A weight follows a schedule, which may depend on running means, and the gate of the SDPO teacher. A
share is the norm of a channel's gradient, weighted as in the total, over the sum of all norms.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.channels.step import POLICY
from composer_mesh.configs.channels import ChannelSchedule, Decay
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

RATE = 0.1
"""Weight of a new value: a mean over about the last ten steps that have one."""
ADVANTAGE, WINS = "sdpo/advantage_over_student", "sdpo/advantage_wins"
FOLLOWED = ("success", "agreement")

FREE = (0.0, 1.0)
"""Bounds of a channel that has none."""

Bounds = Mapping[str, tuple[float, float]]
"""Lowest and highest share of channels, by name."""


class ChannelWeights:
    """Computes the weights; a step's own measurements count from the next step on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._means = RunningMeans()

    def of(self, step: int) -> dict[str, float]:
        """Return the weight of each channel in a step (0-based), in the order of their losses."""
        followed = {name: self._means[name] for name in FOLLOWED}
        found = {POLICY: 1.0} | {
            name: channel_weight(one.peak, one.schedule, step, self._config.run.steps, followed)
            for name, one in self._config.weighted_channels.items()
        }
        return found if self._teaches() else found | {"sdpo": 0.0}

    def finish_step(self, batch: StepBatch, figures: Mapping[str, float]) -> dict[str, float]:
        """Take a step's measurements; return the metrics of what its weights followed."""
        found = self._metrics()
        self._means.note(
            {
                "success": batch.success,
                "agreement": batch.agreement,
                "advantage": figures.get(ADVANTAGE),
                "advantage_wins": figures.get(WINS),
            }
        )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return self._means.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._means.load_state_dict(state)

    def _teaches(self) -> bool:
        """Whether the teacher's running advantage lets the SDPO channel train; unknown, it does."""
        for name, least in self._bounds().items():
            known = self._means[name]
            if known is not None and known < least:
                return False
        return True

    def _bounds(self) -> dict[str, float]:
        """Return the lowest running means with which the SDPO channel trains."""
        sdpo = self._config.sdpo
        found = {"advantage": sdpo.min_advantage, "advantage_wins": sdpo.min_advantage_wins}
        return {name: least for name, least in found.items() if least is not None}

    def _metrics(self) -> dict[str, float]:
        sdpo = self._config.sdpo
        gated = sdpo.on and sdpo.is_gated
        used = list(self._bounds()) if sdpo.on else []
        used += [one.schedule.by for one in self._config.weighted_channels.values() if one.on]
        known = {name: self._means[name] for name in dict.fromkeys(used) if name != "steps"}
        found = {f"running/{name}": value for name, value in known.items() if value is not None}
        return found | ({"sdpo/gate": float(self._teaches())} if gated else {})


class RunningMeans:
    """Exponential means by name, each corrected for its beginning at 0 as Adam's moments are.

    Part of checkpoints, known to all ranks alike, and deterministic over resumes.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def __getitem__(self, name: str) -> float | None:
        """Return a mean; None before its first value."""
        total, weight = self._sums.get(name, (0.0, 0.0))
        return total / weight if weight else None

    def note(self, values: Mapping[str, float | None]) -> None:
        """Take the values of a step; None is no value."""
        for name, value in values.items():
            if value is not None:
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (
                    (1 - RATE) * total + RATE * value,
                    (1 - RATE) * weight + RATE,
                )

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state as JSON values."""
        return {name: list(sums) for name, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore a state."""
        self._sums = {
            name: (float(total), float(weight)) for name, (total, weight) in state.items()
        }


def channel_weight(
    peak: float,
    schedule: ChannelSchedule,
    step: int,
    steps: int,
    followed: Mapping[str, float | None] | None = None,
) -> float:
    """Return a channel's weight in a step (0-based) of a run of `steps`.

    `followed` are the running success and agreement before the step; while the one that the
    schedule follows is unknown, the weight does not fall.
    """
    if schedule.by == "steps":
        done = share_done(schedule.warmup_steps, step, steps)
    else:
        found = (followed or {}).get(schedule.by)
        value = schedule.start if found is None else found
        done = min(1.0, max(0.0, (value - schedule.start) / (schedule.end - schedule.start)))
    return peak * share_of_peak(
        schedule.decay, schedule.warmup_steps, schedule.min_ratio, step, done
    )


def share_done(warmup_steps: int, step: int, steps: int) -> float:
    """Return the share of the steps after the warm-up that are done; the last one is below 1."""
    return (step - warmup_steps) / max(1, steps - warmup_steps)


def share_of_peak(decay: Decay, warmup_steps: int, least: float, step: int, done: float) -> float:
    """Return a step's value as a share of the peak.

    It rises linearly to the peak at the last warm-up step, then decays to `least` where `done` is
    1: in steps, the one after the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return least + (1 - least) * _left(decay, done)


def _left(decay: Decay, done: float) -> float:
    """Return the decay factor (1 to 0) after the share `done` of the decay."""
    match decay:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))


def update_bounds(config: Config) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest share of each channel that has one."""
    found = {}
    for name, section in config.weighted_channels.items():
        low, high = section.min_update_share, section.max_update_share
        if section.on and section.is_bounded:
            found[name] = (FREE[0] if low is None else low, FREE[1] if high is None else high)
    return found


def update_shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Each channel's norm over the sum of all; nothing where all are 0, as no share is defined."""
    total = math.fsum(norms.values())
    return {name: norm / total for name, norm in norms.items()} if total else {}


def bounded_factors(norms: Mapping[str, float], bounds: Bounds) -> dict[str, float]:
    """Return the factor of each channel's gradient that brings its share within its bounds.

        norm'_c = clip(norm_c, low_c * T, high_c * T),   T = sum of norm'_c

    So a gradient is raised only to its lower bound and lowered only to its upper one, and all
    others stay as they are. T is unique where a channel without bounds, such as the policy, has a
    norm above 0. Where none has, it is the largest T; upper bounds that add up to less than 1 are
    then raised to 1 in proportion, so that channels keep their shares of each other. A channel
    whose norm is 0 cannot be raised, and keeps the factor 1.

    Raises ValueError for a norm that is not finite, and for bounds that no shares can keep.
    """
    _check(norms, bounds)
    bounded = {name: bounds[name] for name in norms if name in bounds and norms[name] > 0}
    factors = dict.fromkeys(norms, 1.0)
    if not bounded:
        return factors
    free = math.fsum(norm for name, norm in norms.items() if name not in bounds)
    room = 1.0 if free else min(1.0, math.fsum(high for _, high in bounded.values()))
    ends = {name: (low, high / room) for name, (low, high) in bounded.items()}
    total = _total(free, [(norms[name], *ends[name]) for name in ends])
    for name, (low, high) in ends.items():
        norm = norms[name]
        factors[name] = min(max(norm, low * total), high * total) / norm
    return factors


def _total(free: float, bounded: Sequence[tuple[float, float, float]]) -> float:
    """Solve free / T + sum of shares at T = 1, by bisection; `bounded` are norms with their bounds.

    The left side falls to the sum of the lower bounds. It is 1 or more at the first T: where all
    that are bounded have their upper bounds, or where T is `free` alone.
    """

    def too_small(total: float) -> bool:
        shares = (min(max(norm / total, low), high) for norm, low, high in bounded)
        return free / total > 1 - math.fsum(shares)

    below = free or min(norm / high for norm, _, high in bounded)
    above = 2 * below
    while too_small(above):
        below, above = above, 2 * above
    while below < (middle := (below + above) / 2) < above:
        if too_small(middle):
            below = middle
        else:
            above = middle
    return above


def _check(norms: Mapping[str, float], bounds: Bounds) -> None:
    for name, norm in norms.items():
        if not (math.isfinite(norm) and norm >= 0):
            raise ValueError(
                f"the norm of {name} is {norm} but must be finite and >= 0: lower the learning "
                "rate, or look for a loss that is not finite"
            )
    for name, (low, high) in bounds.items():
        if not (0 <= low <= high <= 1 and high > 0):
            raise ValueError(
                f"the bounds of {name} are {low} and {high} but must be shares, the lower one "
                "first and the upper one above 0: correct them"
            )
    if (least := math.fsum(low for low, _ in bounds.values())) >= 1:
        raise ValueError(
            f"the lower bounds add up to {least}, which leaves the other channels nothing: lower "
            "them to less than 1 together"
        )
