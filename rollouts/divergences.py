"""Divergence between student and SDPO teacher at each token of a hinted turn."""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnDivergences:
    """One hinted turn: a number in nats for each of its sampled tokens, as a float32 array.

    It is the channel's divergence at that token, before the step's update. Where the teacher
    returns log-probs of sampled tokens only, it is the student's log-prob minus the teacher's,
    which may be negative.
    """

    trace_id: str
    turn: int
    values: "array[float]"
