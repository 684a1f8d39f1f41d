"""What rollout workers send and get is the same after a pickle, bit for bit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import Turn

IDS, LOGPROBS, VERSIONS = [0, 2**31 - 1, 7], [-0.1, -5e-324, -0.0], [3, 3, 4]


@pytest.mark.parametrize(
    "sent",
    [
        GenerationRequest("train-0-0-0", IDS, 8, 0.7, 2**62, [1, 2], None),
        GenerationRequest("train-0-0-0", [], 8, 0.0, 0, [], 1.5),
        GenerationResult("train-0-0-0", IDS, LOGPROBS, VERSIONS, "stop", 5),
        Turn([], IDS, LOGPROBS, VERSIONS, "length"),
    ],
)
def test_a_message_with_numbers_is_the_same_after_a_pickle(sent: Any) -> None:
    got = pickle.loads(pickle.dumps(sent))
    assert got == sent
    assert repr(got) == repr(sent)


def test_an_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pickle.dumps(GenerationResult("one", [2**31], [-0.1], [0], "stop"))
