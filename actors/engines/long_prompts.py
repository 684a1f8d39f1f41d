"""How much of a long prompt one forward computes, so that others decode meanwhile.

Pure: which tokens come next, by what has been computed and whether others decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AT_ONCE = {"cpu": 512}
"""Prompt tokens per forward after which no other prompt is admitted: more exceed a CPU's caches."""
AT_ONCE_ELSEWHERE = 8192
BESIDE_DECODING = {"cpu": 128}
"""First tokens of a long prompt per forward while others decode, as long as a step of theirs."""
BESIDE_DECODING_ELSEWHERE = 1024
SMALLEST_PIECE = 8


@dataclass(frozen=True)
class PromptLimits:
    """Prompt tokens of one forward; `beside_decoding` are those of a first piece beside others.

    Later tokens attend to more and take longer: one at position `doubled_at` twice as long as the
    first. Pieces beside others become shorter by as much.
    """

    at_once: int
    beside_decoding: int
    doubled_at: float = float("inf")

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
        )

    def beside(self, position: int) -> int:
        """Return the length of a piece that begins at a position while others decode."""
        share = 1 / (1 + position / self.doubled_at)
        return max(SMALLEST_PIECE, int(self.beside_decoding * share))


@dataclass(slots=True, eq=False)
class LongPrompt(Generic[T]):
    """A request whose prompt takes several forwards; `computed` of `length` tokens are there."""

    request: T
    row: int
    length: int
    computed: int

    def next_piece(self, limits: PromptLimits, decoding: int) -> range:
        """Return which tokens the next forward computes, while so many rows decode."""
        most = limits.beside(self.computed) if decoding else limits.at_once
        return range(self.computed, min(self.length, self.computed + most))
