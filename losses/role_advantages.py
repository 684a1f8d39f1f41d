"""Advantages of roles in multi-agent rollouts, relative to each role's past rewards."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from composer_mesh.losses.reductions import Number


@dataclass
class RoleBaselines:
    """Role-conditioned advantage estimation (RAE of SPIRAL, arXiv 2506.24119).

        A = r - b[role],  then  b[role] = decay b[role] + (1 - decay) r

    A role's baseline tracks its usual reward, so that the advantage of moving first in a zero-sum
    game is removed. Baselines start at 0; `baselines` is the state to save and restore. A reward is
    scored before it updates its own baseline.
    Source: PRIME-RL `RAEAlgorithm` (559b4477), whose decay is the default.
    """

    decay: Number = 0.95
    baselines: dict[Hashable, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"decay is {self.decay} but has to be in [0, 1): use 0.95, at 1 no baseline moves"
            )

    def advantages(self, rewards: Sequence[float], roles: Sequence[Hashable]) -> list[float]:
        """Return rewards, in order, less their roles' baselines, and update these."""
        found = []
        for reward, role in zip(rewards, roles, strict=True):
            baseline = self.baselines.get(role, 0.0)
            found.append(reward - baseline)
            self.baselines[role] = self.decay * baseline + (1 - self.decay) * reward
        return found
