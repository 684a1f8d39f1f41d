"""Lists of numbers in pickles: as arrays, which take a third of the time of lists."""

from __future__ import annotations

from array import array

IDS, LOGPROBS = "i", "d"
"""Types of the arrays: 32-bit integers, and floats as Python has them."""


def packed_ids(ids: list[int]) -> array[int]:
    """Return token ids or versions as an array; raises OverflowError beyond 32 bits."""
    return array(IDS, ids)


def packed_logprobs(logprobs: list[float]) -> array[float]:
    """Return log-probs as an array, bit for bit."""
    return array(LOGPROBS, logprobs)
