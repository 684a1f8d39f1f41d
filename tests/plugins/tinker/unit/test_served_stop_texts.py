"""A served sample ends with the token that completes a stop text."""

from __future__ import annotations

from composer_mesh.plugins.tinker.server.sampling_lane import cut_after
from composer_mesh.rollouts.generation import GenerationResult


def decode(ids: list[int]) -> str:
    return "".join("ab"[one] for one in ids)


def test_a_served_sample_ends_with_its_stop_text_and_has_a_logprob_for_each_token() -> None:
    result = GenerationResult("r", [0, 0, 1, 0], [-1.0, -2.0, -3.0, -4.0], [3, 3, 4, 5], "length")
    cut = cut_after(["ab"], result, decode)
    assert (cut.token_ids, cut.logprobs) == ([0, 0, 1], [-1.0, -2.0, -3.0])
    assert (cut.versions, cut.stop_reason) == ([3, 3, 4], "stop")
    assert cut_after(["zz"], result, decode) is result
