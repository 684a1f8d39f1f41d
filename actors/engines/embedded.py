"""The embedded engine: continuous batching with a KV cache over any Hugging Face causal LM.

One call of `step` is one forward: it admits waiting requests while rows are free, samples one token
for every running request, and retires finished ones. New weights are loaded between steps; running
requests continue with a recomputed cache, so that each token's log-prob is exactly that of the
version it is labelled with. No threads, no messaging.
"""

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded_decode import Capture, CudaGraphs, DecodeSteps
from composer_mesh.actors.engines.embedded_forward import ForwardLayout, PackedForward, TokenRun
from composer_mesh.actors.engines.embedded_requests import (
    JoiningRows,
    LongPrompt,
    PromptLimits,
    RunningRequest,
    SamplingRows,
    on_host,
    sampled,
)
from composer_mesh.actors.engines.fp8 import load_weights, quantize_model
from composer_mesh.actors.engines.kv_cache import Found, Ids, PrefixCache, RowCache, States
from composer_mesh.actors.engines.loop import OpenRequests
from composer_mesh.actors.engines.port import (
    Admitted,
    LogitsNotFinite,
    PromptTokens,
    ResultCallback,
    VersionedWeights,
    refuse_too_long,
    refuse_unknown_experts,
)
from composer_mesh.actors.models.device_memory import DeviceMemory
from composer_mesh.actors.models.expert_routing import choices_of, routers_of
from composer_mesh.actors.models.lora import adapter_weights, add_adapters
from composer_mesh.actors.models.policy import converted, load_model
from composer_mesh.actors.models.sharding import stored_weights
from composer_mesh.actors.models.trained_model import route_experts
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.weights.manifest import UPDATED
from composer_mesh.rollouts.generation import GenerationRequest
from composer_mesh.rollouts.traces import ExpertChoices, StopReason

logger = logging.getLogger(__name__)

STEPS_BETWEEN_PROMPTS = 8
"""Captured decode steps after a forward with prompts before other prompts are admitted."""


class EmbeddedEngine:
    """Serves up to `rows` requests at once, of at most `length` tokens each. Raises
    `ModelNotServed`, and `LogitsNotFinite` for weights of which nothing can be sampled.

    A prompt with more left to compute than `PromptLimits` says is computed in pieces, one long
    prompt at a time, in the last row; the others decode and join meanwhile.

    Equal prompts are computed once, and any prompt from where it differs from all that came before
    and is kept: `prefix_tokens` tokens besides the rows, by default as many as the rows hold; 0
    shares nothing. What is kept survives idle times; new weights and `drop_prefixes` drop it.

    Reused keys may differ in their last bits from recomputed ones, so that answers depend on what
    is kept. The same requests submitted together to an idle engine after `drop_prefixes` give the
    same bits every time, and so does any sequence of such sets in which each follows the answers to
    the one before, without a drop in between.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        length: int,
        version: int = 0,
        *,
        prefix_tokens: int | None = None,
        prompt_limits: PromptLimits | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._rows, self._length = model, rows, length
        self.version = version
        self.prompt_tokens = PromptTokens()
        self._open: OpenRequests[RunningRequest] = OpenRequests()
        self._rested = 0
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._long: LongPrompt[RunningRequest] | None = None
        self._dropping = False
        layers = model.config.get_text_config().num_hidden_layers
        self._cache = RowCache(layers, rows + (capture is not None), length)
        self._forward = PackedForward(model, self._cache, version)
        self._decode = DecodeSteps(model, self._forward, self._cache, rows, capture)
        self._device, self._tells_experts = self._forward.device, routers_of(model) > 0
        self._memory = DeviceMemory(self._device)
        self._limits = prompt_limits or PromptLimits.of(model)
        capacity = rows * length if prefix_tokens is None else prefix_tokens
        self._held = PrefixCache(self._cache, rows, length, capacity)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._long)

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def decoding(self) -> int:
        return len(self._running)

    @property
    def prefixes_kept(self) -> int:
        """Number of tokens whose keys are kept for later prompts."""
        return self._held.tokens

    def submit(
        self, request: GenerationRequest, done: ResultCallback, admitted: Admitted | None = None
    ) -> None:
        """Queue a request; `admitted`, then `done` are called from within later steps."""
        refuse_too_long(request, self._length)
        refuse_unknown_experts(request, self._tells_experts)
        generator = torch.Generator().manual_seed(request.seed)
        draws = torch.rand(request.max_new_tokens, generator=generator, dtype=torch.float64)
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        new = RunningRequest(request, done, admitted, draws.tolist(), prompt)
        self._open.add(request.request_id, new)
        self._waiting.append(new)

    def abort(self, request_id: str) -> None:
        """Give a request up; the next step frees its row, and keeps its prefix."""
        given_up = self._open.abort(request_id)
        if given_up is not None:
            given_up.aborted = True

    def drop_prefixes(self) -> None:
        """Drop, before the next step, all that is kept for later prompts."""
        self._dropping = True

    @torch.inference_mode()
    def step(self) -> int:
        """Admit requests, sample one token each, retire; return the number of sampled tokens."""
        self._retire([row for row, running in enumerate(self._running) if running.aborted])
        if self._long is not None and self._long.request.aborted:
            self._long = None
        if self._dropping:
            self._dropping = False
            self._held.drop()
        self._held.tick()
        decoding = len(self._running)
        joining = self._admit()
        sampled = len(self._running)
        if joining.runs:
            logits = self._logits(decoding, joining)
        if sampled:
            self._append(*(self._sample(logits) if joining.runs else self._decoded()))
            self._answer()
        return sampled

    @torch.inference_mode()
    def swap(self, weights: VersionedWeights) -> None:
        """Load new weights and recompute the cache of running requests."""
        load_weights(self._model, weights)
        self._decode.check_addresses()
        self.version = weights.version
        self._held.drop()
        self._compute_again()

    def sleep(self, replaced: Collection[str]) -> None:
        """Free the memory of weights and keys; keep on the host all but the `replaced` weights."""
        self._held.drop()
        self._cache.free()
        self._decode.drop()
        weights = stored_weights(self._model)
        new = [one for name, one in weights.items() if name in replaced]
        ids = set(map(id, new))
        kept = [one for one in weights.values() if id(one) not in ids]
        self._memory.release(kept, replaced=new)

    @torch.inference_mode()
    def wake(self, weights: VersionedWeights | None) -> None:
        """Serve again, with these weights if given; recompute the cache of running requests."""
        self._memory.restore()
        if weights is None:
            self._compute_again()
        else:
            self.swap(weights)

    def _compute_again(self) -> None:
        """Compute the keys of running requests, where none are kept."""
        if self._long is not None:
            self.prompt_tokens.computed += self._long.computed
            self._long.computed = 0
        sequences = [self._held.ids(row) for row in range(len(self._running))]
        rows = list(range(len(sequences)))
        while rows:
            rows = self._recompute(rows, sequences)

    def close(self) -> None:
        """Do nothing: everything is freed with the process."""

    def _recompute(self, rows: Sequence[int], sequences: list[Ids]) -> list[int]:
        """Compute the keys of rows by one forward; return the rows that are left for the next."""
        self._held.tick()
        joining, later = JoiningRows(), list[int]()
        for row in rows:
            keys = sequences[row][:-1]
            found = self._held.find(keys)
            if found.pending or joining.tokens >= self._limits.at_once:
                later.append(row)
                continue
            start = self._held.begin(row, keys, found)
            if start < len(keys):
                joining.compute(TokenRun(row, start, len(keys)))
        if joining.runs:
            self._compute(0, joining.runs, dict(enumerate(sequences)), keep=[])
        for run in joining.runs:
            self._held.computed(run.row, sequences[run.row][: run.end])
        self.prompt_tokens.computed += joining.tokens
        return later

    def _admit(self) -> JoiningRows:
        """Assign rows to waiting requests, up to the row and token limits of one forward.

        A prompt that begins like one of this forward waits for the next, which can reuse its keys.
        Where decode steps are captured, prompts that come after a forward with all prompts that
        there were wait for `STEPS_BETWEEN_PROMPTS` of them: a forward with prompts is not captured,
        and takes as long as several.
        """
        joining, later = JoiningRows(), list[RunningRequest]()
        if self._long is not None and not self._long.rests(bool(self._running)):
            self._go_on(self._long, joining)
        gathers = self._decode.captures and len(self._running) > 0
        resting = gathers and self._rested < STEPS_BETWEEN_PROMPTS
        while (
            self._waiting
            and not resting
            and len(self._running) + (self._long is not None) < self._rows
            and joining.tokens < self._limits.at_once
            and len(later) < self._rows
        ):
            new = self._waiting.popleft()
            if not (new.aborted or self._join(new, joining)):
                later.append(new)
        self._waiting.extendleft(reversed(later))
        if joining.runs:
            more = later or joining.tokens >= self._limits.at_once
            self._rested = STEPS_BETWEEN_PROMPTS if more else 0
        return joining

    def _join(self, new: RunningRequest, joining: JoiningRows) -> bool:
        """Assign the next row to a request; False if it should wait for another's keys."""
        row, prompt = len(self._running), new.prompt
        leader = row
        if self._held.sharing:
            leader = joining.by_prompt.get(prompt.tobytes(), row)
        if leader == row:
            found = self._held.find(prompt[:-1])
            if found.pending:
                return False
            if len(prompt) - found.ready > self._limits.at_once:
                return self._long is None and self._begin_long(new, found, joining)
            new.cached = self._held.begin(row, prompt, found)
            joining.compute(TokenRun(row, new.cached, len(prompt)))
            joining.by_prompt[prompt.tobytes()] = row
        else:
            new.cached = len(prompt)
        self._count(new)
        joining.leaders.append(leader)
        self._running.append(new)
        return True

    def _count(self, admitted: RunningRequest) -> None:
        self.prompt_tokens.admit(len(admitted.prompt), admitted.cached)
        if admitted.admitted is not None:
            admitted.admitted()

    def _begin_long(self, new: RunningRequest, found: Found[States], joining: JoiningRows) -> bool:
        """Assign the last row to a request with a long prompt, and compute its first piece."""
        row = self._rows - 1
        self._long = LongPrompt(new, row, len(new.prompt), found.ready)
        end = self._long.next_piece(self._limits, self._decoding_lengths()).stop
        new.cached = self._held.begin(row, new.prompt[:end], found)
        self._count(new)
        self._compute_piece(self._long, TokenRun(row, new.cached, end), joining)
        return True

    def _go_on(self, long: LongPrompt[RunningRequest], joining: JoiningRows) -> None:
        """Compute the next piece of a long prompt; with the last one its request runs."""
        new, piece = long.request, long.next_piece(self._limits, self._decoding_lengths())
        row = long.row
        if piece.stop == long.length:
            row, self._long = len(self._running), None
            if row != long.row:
                self._cache.copy(long.row, row, piece.start)
            joining.by_prompt[new.prompt.tobytes()] = row
            joining.leaders.append(row)
            self._running.append(new)
        self._held.announce(new.prompt[: piece.stop])
        self._compute_piece(long, TokenRun(row, piece.start, piece.stop), joining)

    def _decoding_lengths(self) -> list[int]:
        return self._held.known[: len(self._running)].tolist()

    @staticmethod
    def _compute_piece(
        long: LongPrompt[RunningRequest], run: TokenRun, joining: JoiningRows
    ) -> None:
        long.computed = run.end
        joining.compute(run)

    def _logits(self, decoding: int, joining: JoiningRows) -> Tensor:
        """Run one forward for all rows; return logits `[running, V]`; copy duplicates' keys."""
        prompts = {row: running.prompt for row, running in enumerate(self._running)}
        if self._long is not None:
            prompts[self._long.row] = self._long.request.prompt
        where = list(range(decoding))
        place, ends = decoding, {}
        for number, run in enumerate(joining.runs):
            place += run.end - run.start
            where.append(place - 1)
            ends[run.row] = decoding + number
        logits = self._compute(decoding, joining.runs, prompts, keep=where)
        for run in joining.runs:
            self._held.computed(run.row, prompts[run.row][: run.end])
        for row, leader in enumerate(joining.leaders, start=decoding):
            self._held.put(row, prompts[row])
            if leader != row:
                self._cache.copy(leader, row, len(prompts[row]))
        if [run.row for run in joining.runs] == joining.leaders:
            return logits
        return logits[[*range(decoding), *(ends[leader] for leader in joining.leaders)]]

    def _compute(
        self,
        decoding: int,
        runs: list[TokenRun],
        sequences: Mapping[int, Ids],
        keep: list[int],
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
        plan = ForwardLayout(self._cache, decoding, runs, positions, longest, ragged)
        kept = torch.tensor(keep, dtype=torch.long, device=self._device)
        return self._forward(plan, tokens, kept)

    def _decoded(self) -> tuple[list[int], list[float]]:
        """Run a decode step of all running rows; return the next id and its log-prob of each."""
        rows = len(self._running)
        self._rested += 1
        return self._decode(self._running, self._held.newest(rows), self._held.known[:rows])

    def _sample(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Return what was sampled of logits `[running, V]`, with the requests' own draws."""
        rows = SamplingRows.of(self._running, logits.device)
        return on_host(sampled(logits, rows))

    def _append(self, tokens: list[int], logprobs: list[float]) -> None:
        self._held.append(tokens)
        for running, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            running.token_ids.append(token)
            running.logprobs.append(logprob)
            running.versions.append(self.version)

    def _answer(self) -> None:
        """Retire and answer requests that are finished, or whose logits were not finite."""
        ended, failed = list[tuple[int, RunningRequest, StopReason]](), list[int]()
        for row, running in enumerate(self._running):
            if math.isnan(running.logprobs[-1]):
                failed.append(row)
            elif (reason := running.finished) is not None:
                ended.append((row, running, reason))
        for row, running, _ in ended:
            running.experts = self._experts_of(row, running.request)
        broken = [self._running[row] for row in failed]
        self._retire([row for row, _, _ in ended], failed)
        for running in broken:
            if self._open.answer(running.request.request_id, running):
                running.done(LogitsNotFinite(running.request.request_id, self.version))
        for _, running, reason in reversed(ended):
            if self._open.answer(running.request.request_id, running):
                running.answer(reason)

    def _experts_of(self, row: int, request: GenerationRequest) -> ExpertChoices | None:
        """Return the experts of a row that its request asks for."""
        if request.experts_from is None:
            return None
        computed = int(self._held.known[row]) - 1
        numbers = self._cache.experts(row, request.experts_from, computed)
        return choices_of(numbers, self._model.config)

    def _retire(self, rows: list[int], broken: Sequence[int] = ()) -> None:
        """Keep the prefixes of running rows, clear broken ones, and close the gaps they leave."""
        for row in rows:
            self._held.keep(row)
        for row in broken:
            self._cache.clear(row)
        for row in sorted([*rows, *broken], reverse=True):
            self._held.move(len(self._running) - 1, row)
            self._running[row] = self._running[-1]
            self._running.pop()


def start(config: Config, folder: Path) -> EmbeddedEngine:
    """Return the embedded engine, serving the model of `folder` as version 0."""
    dtype = getattr(torch, config.generator.dtype)
    model = converted(load_model(folder), dtype).to(own_device())
    if config.syncs_adapters and config.trainer.lora is not None:
        lora = config.trainer.lora.model_copy(update={"dropout": 0.0})
        add_adapters(model, lora, config.run.seed)
        setattr(model.requires_grad_(False), UPDATED, set(adapter_weights(model)))
    moe = config.trainer.moe
    route_experts(model, moe, dtype, moe.router_replay, like=lambda: model)
    if config.generator.quantization == "fp8":
        quantize_model(model)
    return EmbeddedEngine(
        model,
        config.generator.max_concurrent,
        config.policy.max_context,
        prefix_tokens=config.generator.prefix_tokens,
        capture=_capture_of(model, config.generator.cuda_graphs),
    )


def _capture_of(model: Any, wanted: bool | None) -> CudaGraphs | None:
    """Return what captures decode steps, None where they are launched one by one."""
    if model.device.type != "cuda":
        if wanted:
            raise ValueError(
                "generator.cuda_graphs is true, but this generator has no GPU: set "
                "placement.generator.gpus, or leave generator.cuda_graphs out"
            )
        return None
    if wanted is None and routers_of(model):
        logger.info("decode steps of a mixture of experts are not captured as CUDA graphs")
        return None
    return None if wanted is False else CudaGraphs()
