"""The embedded engine: continuous batching with a KV cache over any Hugging Face causal LM.

One call of `step` admits what waits, takes one token for every running request, and retires what
finished. New weights come between steps; running requests go on, their cache recomputed, so each
token's log-prob is exactly that of the version it is labelled with. No threads, no messaging.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.kv_cache import SlotCache
from composer_mesh.actors.engines.port import Done, Weights
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import StopReason


class RequestTooLong(ValueError):
    """The prompt and its continuation do not fit into a cache row."""


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    done: Done
    draws: Tensor
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.request.prompt_ids + self.token_ids

    @property
    def finished(self) -> StopReason | None:
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None


class Engine:
    """Serves up to `rows` requests at once, of at most `length` tokens each."""

    def __init__(self, model: Any, rows: int, length: int, version: int = 0) -> None:
        self._model, self._rows, self._length = model, rows, length
        self.version = version
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._cache = SlotCache(model.config.num_hidden_layers, rows, length)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest, done: Done) -> None:
        """Queues a request; `done` is called from within a later `step`."""
        need = len(request.prompt_ids) + request.max_new_tokens
        if need > self._length:
            raise RequestTooLong(
                f"{request.request_id} needs {len(request.prompt_ids)} prompt and "
                f"{request.max_new_tokens} new tokens but a row holds {self._length}: raise "
                "policy.max_context or lower generator.max_new_tokens"
            )
        generator = torch.Generator().manual_seed(request.seed)
        draws = torch.rand(request.max_new_tokens, generator=generator, dtype=torch.float64)
        self._waiting.append(_Running(request, done, draws))

    @torch.inference_mode()
    def step(self) -> int:
        """Admits, decodes one token for each, retires; returns the number of tokens sampled."""
        decoding = len(self._running)
        if decoding:
            self._sample(self._running, self._decode())
        admitted = self._admit(decoding)
        sampled = len(self._running)
        self._retire()
        return sampled if decoding or admitted else 0

    @torch.inference_mode()
    def swap(self, weights: Weights) -> None:
        """Puts new weights in and recomputes the cache of running requests."""
        weights.apply(self._model)
        self.version = weights.version
        if self._running:
            self._prefill(0, [running.ids[:-1] for running in self._running])

    def close(self) -> None:
        """Nothing is held that the process's end does not give back."""

    def _admit(self, first: int) -> int:
        room = min(self._rows - first, len(self._waiting))
        new = [self._waiting.popleft() for _ in range(room)]
        if new:
            self._running += new
            self._sample(new, self._prefill(first, [running.ids for running in new]))
        return len(new)

    def _prefill(self, first: int, sequences: list[list[int]]) -> Tensor:
        """Fills rows from `first` on; returns the logits `[rows, V]` after each sequence."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        width = int(lengths.max())
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(width).expand(len(sequences), width)
        last, where = torch.unique(lengths - 1, return_inverse=True)
        logits = self._forward(first, tokens, positions, width, last)
        return logits[torch.arange(len(sequences)), where]

    def _decode(self) -> Tensor:
        """One token for every running row; returns logits `[rows, V]`."""
        lengths = torch.tensor([len(running.ids) for running in self._running])
        tokens = torch.tensor([[running.token_ids[-1]] for running in self._running])
        positions = lengths[:, None] - 1
        return self._forward(0, tokens, positions, int(lengths.max()), torch.tensor([0]))[:, 0]

    def _forward(
        self, first: int, tokens: Tensor, positions: Tensor, length: int, keep: Tensor
    ) -> Tensor:
        view = self._cache.view
        view.rows = slice(first, first + len(tokens))
        view.positions, view.length = positions, length
        mask = torch.arange(length)[None, None, None, :] <= positions[:, None, :, None]
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits.float()

    def _sample(self, rows: list[_Running], logits: Tensor) -> None:
        """Draws one token a row by inverting its distribution at the request's own draw."""
        temperature = torch.tensor([[running.request.temperature] for running in rows])
        greedy = temperature[:, 0] == 0
        logprobs = torch.log_softmax(logits / torch.where(temperature == 0, 1, temperature), -1)
        draws = torch.stack([running.draws[len(running.token_ids)] for running in rows])
        cumulative = logprobs.double().exp().cumsum(-1)
        picked = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)
        picked = picked[:, 0].clamp(max=logits.shape[-1] - 1)
        tokens = torch.where(greedy, logits.argmax(-1), picked)
        values = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        for running, token, value in zip(rows, tokens.tolist(), values, strict=True):
            running.token_ids.append(token)
            running.logprobs.append(value)
            running.versions.append(self.version)

    def _retire(self) -> None:
        """Answers finished requests and closes the gaps that they leave in the cache."""
        row = 0
        while row < len(self._running):
            running = self._running[row]
            reason = running.finished
            if reason is None:
                row += 1
                continue
            last = self._running.pop()
            if last is not running:
                self._running[row] = last
                self._cache.move(len(self._running), row, len(last.ids))
            running.done(
                GenerationResult(
                    running.request.request_id,
                    running.token_ids,
                    running.logprobs,
                    running.versions,
                    reason,
                )
            )
