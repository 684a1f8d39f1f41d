"""The section `[data.curriculum]`: training episodes by their measured success."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, Section, Share


class CurriculumConfig(Section):
    """Training episodes and tasks chosen by their success so far, towards a target band."""

    low: Share = 0.1
    """Lowest success of an episode's latest group with which it is played again by preference."""

    high: Share = 0.9
    """Highest success of an episode's latest group with which it is played again by preference."""

    explore: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the groups that play a new episode whatever is known; also the smallest factor of a
    task's weight in a mixture."""

    window: Count = 64
    """Number of a task's latest groups whose success moves its weight in a mixture."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> Self:
        if self.low > self.high:
            raise ValueError(
                f"low is {self.low} but high is {self.high}, so no success is in the band: lower "
                "low to at most that"
            )
        return self

    def holds(self, successes: int, samples: int) -> bool:
        """Whether a success rate is in the band; that of no samples is not."""
        return samples > 0 and self.low <= successes / samples <= self.high

    def fit(self, success: float) -> float:
        """Return 1 in the band, and less towards 0 and 1 outside of it."""
        if success < self.low:
            return success / self.low
        return (1 - success) / (1 - self.high) if success > self.high else 1.0
