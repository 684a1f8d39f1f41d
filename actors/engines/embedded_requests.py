"""The requests of the embedded engine: those that run, and those that join them in a step.

Samples one token per row from the distribution whose log-prob is reported. Stateless.

How much of a long prompt one forward computes, so that others decode meanwhile.

Pure: which tokens come next, by what has been computed and whether others decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded_forward import TokenRun
from composer_mesh.actors.engines.kv_cache import Ids
from composer_mesh.actors.engines.port import Admitted, ResultCallback
from composer_mesh.rollouts.generation import WHOLE, GenerationRequest, GenerationResult, Truncation
from composer_mesh.rollouts.traces import ExpertChoices, StopReason


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    draws: Sequence[float],
    truncations: Sequence[Truncation] = (),
) -> tuple[list[int], list[float]]:
    """Return token ids and log-probs for float32 logits `[rows, V]`; temperature 0 is greedy.

    A draw in [0, 1) picks the token at which the cumulative distribution passes it, so that a token
    depends on its own row only. Greedy log-probs are those of temperature 1, of all tokens. A row
    whose logits are not finite has the log-prob NaN, and an id without a meaning.
    """
    if any(temperature not in (0, 1) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits = logits / torch.tensor(divisors, device=logits.device)[:, None]
    if any(truncation != WHOLE for truncation in truncations):
        rows = zip(logits, temperatures, truncations, strict=True)
        logits = torch.stack([truncated(row, cut) if heat else row for row, heat, cut in rows])
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    sought = torch.tensor(draws, device=logits.device)[:, None] * total
    # Rounding may reach the total itself, which no token passes.
    below = torch.nextafter(total, torch.zeros_like(total))
    picked = torch.searchsorted(cumulative, torch.minimum(sought, below), right=True)
    picked = picked.clamp(max=logits.shape[-1] - 1)  # NaN is found nowhere
    if 0 in temperatures:
        greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        picked = torch.where(
            greedy.to(logits.device)[:, None], logits.argmax(-1, keepdim=True), picked
        )
    chosen = logprobs.gather(-1, picked)
    return picked[:, 0].tolist(), chosen[:, 0].tolist()


def truncated(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return logits `[V]` in which tokens that may not be sampled are -inf, as vLLM's are.

    Tokens that are as probable as the last of the `top_k` stay too.
    """
    if truncation.min_p:
        least = logits.max() + math.log(truncation.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if 0 < truncation.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(truncation.top_k).values[-1], -torch.inf)
    if truncation.top_p < 1:
        ascending, places = logits.sort()
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - truncation.top_p
        outside[-1] = False
        logits = logits.masked_fill(outside[places.argsort()], -torch.inf)
    return logits


T = TypeVar("T")

AT_ONCE = {"cpu": 512}
"""Prompt tokens per forward after which no other prompt is admitted: more exceed a CPU's caches."""
AT_ONCE_ELSEWHERE = 8192
DURING_DECODING = {"cpu": 128}
"""First tokens of a long prompt per forward while others decode: a pause of theirs."""
DURING_DECODING_ELSEWHERE = 1024
SMALLEST_PIECE = 8
STEP_TOKENS = {"cpu": 8}
"""Prompt tokens that take as long as what a step of decoding costs without its rows."""
STEP_TOKENS_ELSEWHERE = 128


@dataclass(frozen=True)
class PromptLimits:
    """Prompt tokens of one forward; `during_decoding` are those of a first piece if others decode.

    Later tokens attend to more and take longer: one at position `doubled_at` twice as long as the
    first. Pieces while others decode become shorter by as much. A step of decoding takes as long
    as `step_tokens` first tokens and one for each row; by that count, and not by a clock, which
    would make answers depend on it, pieces take half of the time.
    """

    at_once: int
    during_decoding: int
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
            DURING_DECODING.get(device, DURING_DECODING_ELSEWHERE),
            weights / (2 * config.num_hidden_layers * heads * width),
            STEP_TOKENS.get(device, STEP_TOKENS_ELSEWHERE),
        )

    def piece_during_decoding(self, position: int) -> int:
        """Return the length of a piece that begins at a position while others decode."""
        return max(SMALLEST_PIECE, int(self.during_decoding / self._cost(position)))

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
        most = limits.piece_during_decoding(self.computed) if decoding else limits.at_once
        piece = range(self.computed, min(self.length, self.computed + most))
        self.resting = limits.steps_for(piece, decoding)
        return piece


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request and what it has sampled; `cached` tokens of its prompt were not computed for it."""

    request: GenerationRequest
    done: ResultCallback
    admitted: Admitted | None
    draws: list[float]
    prompt: Ids
    cached: int = 0
    aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: ExpertChoices | None = None

    @property
    def finished(self) -> StopReason | None:
        """Why nothing more is sampled; None while it continues."""
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def answer(self, reason: StopReason) -> None:
        """Hand over the result."""
        name, sampled = self.request.request_id, (self.token_ids, self.logprobs, self.versions)
        self.done(GenerationResult(name, *sampled, reason, self.cached, self.experts))


@dataclass(slots=True)
class JoiningRows:
    """Rows that start in this step, after those that decode, and a piece of a long prompt."""

    runs: list[TokenRun] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    """For each new row the row with the same prompt, its own index where it is computed."""
    by_prompt: dict[bytes, int] = field(default_factory=dict)
    tokens: int = 0

    def compute(self, run: TokenRun) -> None:
        """Add tokens that this step's forward computes."""
        self.runs.append(run)
        self.tokens += run.end - run.start
