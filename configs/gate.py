"""Value-of-information gate: selects the student's states to send to teachers.

`rollouts.state_value` computes the signals.
"""

from typing import Self

from pydantic import model_validator

from composer_mesh.configs.base import NotNegative, Positive, Section, Share


class GateConfig(Section):
    """Value of a state: the weighted mean of four signals, each from 0 to 1."""

    min_value: Share = 0.0
    """Minimum value of a state to be queried; 0 only orders the states."""

    error: NotNegative = 1.0
    """Weight of the error signal: 1 if the turn's action failed, 0.5 if only its episode did."""

    entropy: NotNegative = 0.5
    """Weight of the student's uncertainty: the mean surprisal of its sampled tokens."""

    disagreement: NotNegative = 0.5
    """Weight of the disagreement between the group's samples, in actions and in reward."""

    novelty: NotNegative = 0.5
    """Weight of novelty: how rarely such a state was queried before in the run."""

    entropy_scale: Positive = 1.0
    """Surprisal in nats at which the entropy signal is about 0.63."""

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not any((self.error, self.entropy, self.disagreement, self.novelty)):
            raise ValueError(
                "error, entropy, disagreement and novelty are all 0, so every state has the same "
                "value: give at least one of them a weight"
            )
        return self
