"""The value-of-information gate: which of the student's states are worth a teacher's answer.

How the signs are measured is `rollouts.state_value`.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Positive, Section, Share


class GateConfig(Section):
    """Which states are worth an answer: a weighted mean of four signs, each from 0 to 1."""

    min_value: Share = 0.0
    """States below it are not asked about; 0 only orders them."""

    error: Annotated[float, Field(ge=0)] = 1.0
    """Weight of: the turn's action failed (1), or the episode did (0.5)."""

    entropy: Annotated[float, Field(ge=0)] = 0.5
    """Weight of how unsure the student was: mean surprisal of its sampled tokens."""

    disagreement: Annotated[float, Field(ge=0)] = 0.5
    """Weight of how much the group's samples differ in what they did there and in reward."""

    novelty: Annotated[float, Field(ge=0)] = 0.5
    """Weight of how seldom such a state was asked about before in the run."""

    entropy_scale: Positive = 1.0
    """Surprisal in nats at which the entropy sign is about 0.63."""

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not any((self.error, self.entropy, self.disagreement, self.novelty)):
            raise ValueError(
                "error, entropy, disagreement and novelty are all 0, so every state has the same "
                "value: give at least one of them a weight"
            )
        return self
