"""How much of a long prompt one forward computes, so that others decode meanwhile.

Pure: which tokens come next, by what has been computed and whether others decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AT_ONCE = {"cpu": 512}
"""Prompt tokens per forward after which no other prompt is admitted: more exceed a CPU's caches."""
AT_ONCE_ELSEWHERE = 8192
BESIDE_DECODING = {"cpu": 128}
"""First tokens of a long prompt per forward while others decode: a pause of theirs."""
BESIDE_DECODING_ELSEWHERE = 1024
SMALLEST_PIECE = 8
STEP_TOKENS = {"cpu": 8}
"""Prompt tokens that take as long as what a step of decoding costs beside its rows."""
STEP_TOKENS_ELSEWHERE = 128


@dataclass(frozen=True)
class PromptLimits:
    """Prompt tokens of one forward; `beside_decoding` are those of a first piece beside others.

    Later tokens attend to more and take longer: one at position `doubled_at` twice as long as the
    first. Pieces beside others become shorter by as much. A step of decoding takes as long as
    `step_tokens` first tokens and one for each row; by that count, and not by a clock, which would
    make answers depend on it, pieces take half of the time.
    """

    at_once: int
    beside_decoding: int
    doubled_at: float = float("inf")
    step_tokens: float = float("inf")

    @classmethod
    def of(cls, model: Any) -> PromptLimits:
        """Return the limits of a Hugging Face causal LM on its device."""
        device, config = model.device.type, model.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        weights = sum(one.numel() for one in model.base_model.parameters())
        weights -= model.get_input_embeddings().weight.numel()
        return cls(
            AT_ONCE.get(device, AT_ONCE_ELSEWHERE),
            BESIDE_DECODING.get(device, BESIDE_DECODING_ELSEWHERE),
            weights / (2 * config.num_hidden_layers * heads * width),
            STEP_TOKENS.get(device, STEP_TOKENS_ELSEWHERE),
        )

    def beside(self, position: int) -> int:
        """Return the length of a piece that begins at a position while others decode."""
        return max(SMALLEST_PIECE, int(self.beside_decoding / self._cost(position)))

    def steps_for(self, piece: range, decoding: Sequence[int]) -> int:
        """Return how many steps of decoding rows of these lengths take as long as a piece."""
        cost = len(piece) * self._cost(piece.start)
        step = self.step_tokens + sum(map(self._cost, decoding))
        return max(1, math.ceil(cost / step)) if decoding else 1

    def _cost(self, position: int) -> float:
        """Return how long a token at a position takes, in first tokens."""
        return 1 + position / self.doubled_at


@dataclass(slots=True, eq=False)
class LongPrompt(Generic[T]):
    """A request whose prompt takes several forwards; `computed` of `length` tokens are there.

    The next piece follows after `resting` steps of others.
    """

    request: T
    row: int
    length: int
    computed: int
    resting: int = 0

    def rests(self, decoding: bool) -> bool:
        """Count a step, in which others decode; whether it belongs to them alone."""
        self.resting = self.resting - 1 if decoding else 0
        return self.resting > 0

    def next_piece(self, limits: PromptLimits, decoding: Sequence[int]) -> range:
        """Return which tokens this forward computes, while rows of these lengths decode."""
        most = limits.beside(self.computed) if decoding else limits.at_once
        piece = range(self.computed, min(self.length, self.computed + most))
        self.resting = limits.steps_for(piece, decoding)
        return piece
