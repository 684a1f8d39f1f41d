"""A continuation ends at the first token that completes a stop text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from composer_mesh.rollouts.generation import GenerationResult, cut_at, tokens_to_stop

PIECES = [b"a", b"b", b"ab", b" ", b"\n", "é".encode(), b"\xc3", b"\xa9", "日".encode()]
PIECES += [b"\xe6", b"\x97", b"\xa5", b"\xa5a", b"b\xe6\x97", "\U0001f600".encode(), b"\xf0\x9f"]


class Decoder:
    """A tokenizer with tokens of parts of characters; it counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return b"".join(PIECES[one] for one in ids).decode(errors="replace")


def first_with(stops: Sequence[str], ids: list[int]) -> int | None:
    """The definition: the shortest beginning that has a stop text, where the whole has one."""
    decode = Decoder()
    found = [n for n in range(1, len(ids) + 1) if any(one in decode(ids[:n]) for one in stops)]
    return found[0] if found and any(one in decode(ids) for one in stops) else None


def test_the_shortest_beginning_with_a_stop_text_is_found() -> None:
    chance = random.Random(52)
    texts = ["a", "ab", "ba", "é", "日", "a日", "\U0001f600", "b\n", "aab", ""]
    for _ in range(20_000):
        ids = [chance.randrange(len(PIECES)) for _ in range(chance.randrange(12))]
        stops = chance.sample(texts, chance.randrange(3))
        assert tokens_to_stop(stops, ids, Decoder()) == first_with(stops, ids), (stops, ids)


def test_a_stop_text_of_half_a_character_ends_a_beginning_that_holds_it() -> None:
    chance = random.Random(53)
    for _ in range(2000):
        ids = [chance.randrange(len(PIECES)) for _ in range(12)]
        count = tokens_to_stop(["\ufffd"], ids, Decoder())
        assert (count is None) == ("\ufffd" not in Decoder()(ids))
        assert count is None or "\ufffd" in Decoder()(ids[:count])


def test_a_long_continuation_is_decoded_few_times() -> None:
    ids = [0] * 8000 + [1]
    decode = Decoder()
    assert tokens_to_stop(["ab"], ids, decode) == 8001
    assert decode.decoded <= 15 * len(ids)


def test_what_is_cut_has_no_stop_text() -> None:
    result = GenerationResult("r", [0, 0, 1, 0], [-1.0] * 4, [3] * 4, "stop")
    cut = cut_at(["ab"], result, Decoder())
    assert (cut.token_ids, cut.logprobs, cut.versions) == ([0, 0], [-1.0] * 2, [3] * 2)
    assert cut.stop_reason == "length"
    assert cut_at(["zz"], result, Decoder()) is result
