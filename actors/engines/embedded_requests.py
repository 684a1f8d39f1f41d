"""The requests of the embedded engine: those that run, and those that join them in a step.

Samples one token per row from the distribution whose log-prob is reported, on the device of its
logits. Stateless.

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
from composer_mesh.rollouts.generation import WHOLE, GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import ExpertChoices, StopReason


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """Which parts of sampling a batch needs, as known before its logits are computed."""

    tempered: bool
    """Some temperature is neither 0 nor 1."""
    greedy: bool
    """Some temperature is 0."""
    truncated: bool
    """Some sampled row leaves tokens out."""

    @classmethod
    def of(cls, running: Sequence[RunningRequest]) -> SamplingKind:
        """Return what running requests need."""
        asked = [one.request for one in running]
        return cls(
            any(one.temperature not in (0, 1) for one in asked),
            any(one.temperature == 0 for one in asked),
            any(one.temperature and one.truncation != WHOLE for one in asked),
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a batch is sampled: `values` are float64 `[5, rows]`, where logits are.

    They are draws in [0, 1), temperatures, and `top_p`, `top_k` and `min_p` of its truncation.
    """

    values: Tensor
    kind: SamplingKind

    @classmethod
    def of(cls, running: Sequence[RunningRequest], device: torch.device) -> SamplingRows:
        """Return those of the next tokens of running requests, by one copy to a device."""
        columns = torch.tensor([one.sampling for one in running], dtype=torch.float64)
        return cls(columns.T.contiguous().to(device), SamplingKind.of(running))


def on_host(tokens_and_logprobs: Tensor) -> tuple[list[int], list[float]]:
    """Return ids and log-probs of what `sampled` returned, by one copy, which waits for it."""
    tokens, logprobs = tokens_and_logprobs.cpu()
    return tokens.long().tolist(), logprobs.tolist()


def sampled(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return token ids and log-probs, float64 `[2, rows]`, for float32 logits `[rows, V]`.

    A draw picks the token at which the cumulative distribution passes it, so that a token depends
    on its own row only. Temperature 0 is greedy; its log-probs are those of temperature 1, of all
    tokens. A row whose logits are not finite has the log-prob NaN, and an id without a meaning.
    Nothing depends on values on the host: it may be captured.
    """
    draws, temperatures, *cuts = rows.values[:, :, None].unbind()
    greedy = temperatures == 0
    if rows.kind.tempered:
        logits = logits / temperatures.masked_fill(greedy, 1.0).float()
    if rows.kind.truncated:
        logits = torch.where(greedy, logits, truncated(logits, *cuts))
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    sought = draws.float() * total
    # Rounding may reach the total itself, which no token passes.
    below = torch.nextafter(total, torch.zeros_like(total))
    picked = torch.searchsorted(cumulative, torch.minimum(sought, below), right=True)
    picked = picked.clamp(max=logits.shape[-1] - 1)  # NaN is found nowhere
    if rows.kind.greedy:
        picked = torch.where(greedy, logits.argmax(-1, keepdim=True), picked)
    chosen = logprobs.gather(-1, picked)
    return torch.stack([picked[:, 0].double(), chosen[:, 0].double()])


def truncated(logits: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return logits `[rows, V]` in which tokens that may not be sampled are -inf, as vLLM's are.

    The limits are float64 `[rows, 1]`, those of `Truncation`. Tokens that are as probable as the
    last of the `top_k` stay too.
    """
    words = logits.shape[-1]
    # A row that is not finite keeps its mark: no comparison with NaN is true.
    least = logits.amax(-1, keepdim=True) + min_p.log().float()
    logits = logits.masked_fill(logits < least, -torch.inf)
    ascending, places = logits.sort()
    last = torch.where(top_k == 0, words, top_k.clamp(max=words)).long()
    kept = ascending.gather(-1, words - last)
    logits = logits.masked_fill(logits < kept, -torch.inf)
    ascending = ascending.masked_fill(ascending < kept, -torch.inf)
    outside = (ascending.softmax(-1).cumsum(-1) <= (1 - top_p).float()) & (top_p < 1)
    outside[:, -1] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, places, outside), -torch.inf)


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
    def sampling(self) -> tuple[float, ...]:
        """How its next token is sampled: a column of `SamplingRows`."""
        cut = self.request.truncation
        draw = self.draws[len(self.token_ids)]
        return draw, self.request.temperature, cut.top_p, cut.top_k, cut.min_p

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
