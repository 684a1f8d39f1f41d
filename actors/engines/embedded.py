"""The embedded engine: continuous batching with a KV cache over any Hugging Face causal LM.

One call of `step` is one forward: it admits waiting requests while rows are free, samples one token
for every running request, and retires finished ones. New weights are loaded between steps; running
requests continue with a recomputed cache, so that each token's log-prob is exactly that of the
version it is labelled with. No threads, no messaging.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded_attention import Packed, Run
from composer_mesh.actors.engines.embedded_forward import PackedForward
from composer_mesh.actors.engines.embedded_sampling import sample
from composer_mesh.actors.engines.kv_cache import RowCache
from composer_mesh.actors.engines.port import Done, Weights, refuse_too_long
from composer_mesh.actors.engines.prefix_cache import Ids, PrefixCache
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import StopReason

TOKENS_AT_ONCE = {"cpu": 512}
"""Prompt tokens per forward after which no other prompt is admitted: more exceed a CPU's caches."""
TOKENS_AT_ONCE_ELSEWHERE = 8192


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    done: Done
    draws: list[float]
    prompt: Ids
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def finished(self) -> StopReason | None:
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def answer(self, reason: StopReason) -> None:
        name = self.request.request_id
        self.done(GenerationResult(name, self.token_ids, self.logprobs, self.versions, reason))


@dataclass(slots=True)
class _Joining:
    """Rows that start in this step, after those that decode."""

    runs: list[Run] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    """For each new row the row with the same prompt, its own index where it is computed."""
    tokens: int = 0


class Engine:
    """Serves up to `rows` requests at once, of at most `length` tokens each.

    With `sharing`, equal prompts and common prefixes of rows are computed once. A closed batch on
    an idle engine gives the same bits every time, because the prefixes of finished requests are
    dropped when nothing runs or waits. Raises `ModelNotServed`.
    """

    def __init__(
        self, model: Any, rows: int, length: int, version: int = 0, *, sharing: bool = True
    ) -> None:
        self._model, self._rows, self._length = model, rows, length
        self._sharing = sharing
        self.version = version
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._cache = RowCache(model.config.num_hidden_layers, rows, length)
        self._forward = PackedForward(model, self._cache)
        self._device = self._forward.device
        self._budget = TOKENS_AT_ONCE.get(self._device.type, TOKENS_AT_ONCE_ELSEWHERE)
        self._held = PrefixCache(self._cache, rows, length, sharing=sharing)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest, done: Done) -> None:
        """Queue a request; `done` is called from within a later `step`."""
        refuse_too_long(request, self._length)
        generator = torch.Generator().manual_seed(request.seed)
        draws = torch.rand(request.max_new_tokens, generator=generator, dtype=torch.float64)
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        self._waiting.append(_Running(request, done, draws.tolist(), prompt))

    @torch.inference_mode()
    def step(self) -> int:
        """Admit requests, sample one token each, retire; return the number of sampled tokens."""
        decoding = len(self._running)
        joining = self._admit()
        sampled = len(self._running)
        if sampled:
            self._sample(self._logits(decoding, joining))
            self._retire()
        if not self.busy:
            self._held.forget()
        return sampled

    @torch.inference_mode()
    def swap(self, weights: Weights) -> None:
        """Load new weights and recompute the cache of running requests."""
        weights.apply(self._model)
        self.version = weights.version
        sequences = [self._held.ids(row).copy() for row in range(len(self._running))]
        self._held.forget()
        row = 0
        while row < len(sequences):
            first, runs, tokens = row, [], 0
            while row < len(sequences) and tokens < self._budget:
                keys = sequences[row][:-1]
                start = self._held.resume(row, keys)
                if start < len(keys):
                    runs.append(Run(row, start, len(keys)))
                tokens += len(keys) - start
                row += 1
            if runs:
                self._compute(0, runs, sequences, keep=[])
            for done in range(first, row):
                self._held.put(done, sequences[done])

    def close(self) -> None:
        """Do nothing: everything is freed with the process."""

    def _admit(self) -> _Joining:
        """Assign rows to waiting requests, up to the row and token limits of one forward."""
        joining = _Joining()
        leaders: dict[bytes, int] = {}
        while self._waiting and len(self._running) < self._rows and joining.tokens < self._budget:
            new, row = self._waiting.popleft(), len(self._running)
            leader = leaders.setdefault(new.prompt.tobytes(), row) if self._sharing else row
            start = self._held.begin(row, new.prompt[:-1] if leader == row else new.prompt[:0])
            if leader == row:
                joining.runs.append(Run(row, start, len(new.prompt)))
                joining.tokens += len(new.prompt) - start
            joining.leaders.append(leader)
            self._running.append(new)
        return joining

    def _logits(self, decoding: int, joining: _Joining) -> Tensor:
        """Run one forward for all rows; return logits `[running, V]`; copy duplicates' keys."""
        prompts = [running.prompt for running in self._running]
        where = list(range(decoding))
        place, ends = decoding, {}
        for number, run in enumerate(joining.runs):
            place += run.end - run.start
            where.append(place - 1)
            ends[run.row] = decoding + number
        logits = self._compute(decoding, joining.runs, prompts, keep=where)
        for row, leader in enumerate(joining.leaders, start=decoding):
            self._held.put(row, prompts[row])
            if leader != row:
                self._held.copy(leader, row, len(prompts[row]))
        if len(joining.runs) == len(joining.leaders):
            return logits
        return logits[[*range(decoding), *(ends[leader] for leader in joining.leaders)]]

    def _compute(
        self, decoding: int, runs: list[Run], sequences: list[Ids], keep: list[int]
    ) -> Tensor:
        """Run one forward over the newest token of decoding rows and the runs of `sequences`."""
        known = self._held.known[:decoding]
        parts = [(self._held.newest(decoding), known - 1, np.arange(decoding))]
        for run in runs:
            span = np.arange(run.start, run.end)
            parts.append(
                (sequences[run.row][run.start : run.end], span, np.full(len(span), run.row))
            )
        packed = np.concatenate([np.stack(part) for part in parts], axis=1)
        tokens, positions, rows = torch.from_numpy(packed).to(self._device)
        self._cache.aim(torch.stack([rows, positions]))
        longest = int(known.max()) if decoding else 0
        ragged = decoding > 0 and int(known.min()) < longest
        plan = Packed(self._cache, decoding, runs, positions, longest, ragged)
        kept = torch.tensor(keep, dtype=torch.long, device=self._device) if runs else None
        return self._forward(plan, tokens, kept)

    def _sample(self, logits: Tensor) -> None:
        """Sample one token per row by inverse transform sampling with the request's own draw."""
        rows = self._running
        temperatures = [running.request.temperature for running in rows]
        draws = [running.draws[len(running.token_ids)] for running in rows]
        tokens, logprobs = sample(logits, temperatures, draws)
        self._held.append(tokens)
        for running, token, logprob in zip(rows, tokens, logprobs, strict=True):
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            running.versions.append(self.version)

    def _retire(self) -> None:
        """Answer finished requests and close the gaps that they leave in the cache."""
        for row in reversed(range(len(self._running))):
            running = self._running[row]
            reason = running.finished
            if reason is not None:
                self._running[row] = self._running[-1]
                self._running.pop()
                self._held.retire(row, len(self._running))
                running.answer(reason)
