"""vLLM behind the engine interface: token ids in, token ids with log-probs and versions out.

`vllm_start` starts it, `vllm_weights` and `vllm_adapters` update what it serves. Works with any
object that steps like vLLM's `LLMEngine`.
"""

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from composer_mesh.actors.engines.loop import OpenRequests
from composer_mesh.actors.engines.port import (
    Admitted,
    LogitsNotFinite,
    PromptTokens,
    RequestAborted,
    ResultCallback,
    VersionedWeights,
    refuse_too_long,
    refuse_unknown_experts,
)
from composer_mesh.actors.engines.vllm_settings import COLDEST
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import ExpertChoices, StopReason

Sampling = Callable[[GenerationRequest], Any]
Update = Callable[[VersionedWeights], None]
Adapter = Callable[[GenerationRequest], Any]
Experts = Callable[[str, GenerationRequest, Any], ExpertChoices]
"""Tells the experts of a request that has just ended, by vLLM's own name of it and its output."""


class EngineFault(RuntimeError):
    """vLLM violated an invariant; its engine must not be used any more."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request: tokens of prompt and answer together, and ids below `vocabulary`.

    `concurrent` requests at most decode together.
    """

    length: int
    vocabulary: int
    concurrent: int


@dataclass(slots=True, eq=False)
class _SubmittedRequest:
    request: GenerationRequest
    done: ResultCallback
    admitted: Admitted | None
    aborted: bool = False
    own_name: str = ""
    """What vLLM calls it inside."""


class VllmEngine:
    """Serves requests with vLLM's scheduler; every token is labelled with its policy version.

    Requests wait here until vLLM has a free slot, so that its own queue is empty and a request's
    admission is known. Prefixes are kept by vLLM, in blocks that no request uses.
    """

    def __init__(
        self,
        llm: Any,
        sampling: Sampling,
        update: Update,
        limits: RequestLimits,
        adapter: Adapter = lambda _: None,
        experts: Experts | None = None,
    ) -> None:
        """`llm` steps as vLLM's `LLMEngine`; `sampling` converts a request to its parameters.

        `adapter` returns vLLM's `LoRARequest` for a request that is admitted; None without one.
        `experts` tells those of a mixture to requests that ask for them; without it these are
        refused.
        """
        self._llm, self._sampling, self._update, self._limits = llm, sampling, update, limits
        self._adapter, self._experts = adapter, experts
        self.prompt_tokens = PromptTokens()
        self._open: OpenRequests[_SubmittedRequest] = OpenRequests()
        self._waiting: deque[_SubmittedRequest] = deque()
        self._running: dict[str, _SubmittedRequest] = {}
        self._names = count()
        self._dropping = False
        self._label(0)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def decoding(self) -> int:
        return len(self._running)

    def submit(
        self, request: GenerationRequest, done: ResultCallback, admitted: Admitted | None = None
    ) -> None:
        """Queue a request; `admitted`, then `done` are called from within later steps."""
        refuse_too_long(request, self._limits.length)
        refuse_unknown_experts(request, self._experts is not None)
        ids, largest = request.prompt_ids, self._limits.vocabulary - 1
        if not ids or not 0 <= min(ids) <= max(ids) <= largest:
            raise ValueError(
                f"{request.request_id} has {len(ids)} prompt ids but needs at least one, all of "
                f"them from 0 to {largest}: use the tokenizer of the policy's folder"
            )
        if 0 < request.temperature < COLDEST:
            raise ValueError(
                f"{request.request_id} has the temperature {request.temperature}, but vLLM samples "
                f"at {COLDEST} whatever is lower: use 0, which is greedy, or {COLDEST} and more"
            )
        submitted = _SubmittedRequest(request, done, admitted)
        self._open.add(request.request_id, submitted)
        self._waiting.append(submitted)

    def abort(self, request_id: str) -> None:
        """Give a request up; before the next step vLLM frees its blocks, and keeps their keys."""
        given_up = self._open.abort(request_id)
        if given_up is not None:
            given_up.aborted = True

    def drop_prefixes(self) -> None:
        """Drop vLLM's prefix cache before the next step, if nothing decodes then.

        Blocks of running requests cannot be dropped.
        """
        self._dropping = True

    def step(self) -> int:
        """Admit requests and decode; return the token count of the requests answered."""
        self._free_aborted()
        if self._dropping and not self._running and not self._llm.reset_prefix_cache():
            raise EngineFault("vLLM kept cached keys and values though nothing decodes")
        self._dropping = False
        self._admit()
        sampled = 0
        for output in self._llm.step() if self._running else ():
            if output.finished:
                sampled += self._answer(self._running.pop(output.request_id), output)
        return sampled

    def swap(self, weights: VersionedWeights) -> None:
        """Load new weights and invalidate everything cached with the old ones."""
        self._update(weights)
        self._forget_keys(f"under the weights of version {weights.version}")
        self._label(weights.version)

    def _forget_keys(self, when: str) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineFault(
                f"vLLM kept cached keys and values of version {self.version} {when}: its answers "
                "would belong to neither"
            )

    def sleep(self, _: Collection[str]) -> None:
        """Let vLLM move its weights to the host and free its cache; running requests wait.

        Its scheduler is not involved: nothing is stepped while it sleeps.
        """
        self._forget_keys("while it sleeps")
        self._llm.model_executor.sleep(level=1)

    def wake(self, weights: VersionedWeights | None) -> None:
        """Serve again, with these weights if given, which are there before the cache is."""
        self._llm.model_executor.wake_up(tags=["weights"])
        if weights is not None:
            self._update(weights)
            self._label(weights.version)
        self._llm.model_executor.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Shut down workers in other processes; everything else ends with this process."""
        self._llm.model_executor.shutdown()

    def _label(self, version: int) -> None:
        self.version = version
        self._llm.set_weight_version(str(version))

    def _free_aborted(self) -> None:
        names = [name for name, submitted in self._running.items() if submitted.aborted]
        if names:
            self._llm.abort_request(names)
        for name in names:
            del self._running[name]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.concurrent:
            submitted = self._waiting.popleft()
            if submitted.aborted:
                continue
            name = str(next(self._names))
            self._running[name] = submitted
            prompt = {"prompt_token_ids": list(submitted.request.prompt_ids)}
            parameters = self._sampling(submitted.request)
            adapter = self._adapter(submitted.request)
            submitted.own_name = self._llm.add_request(
                name, prompt, parameters, lora_request=adapter
            )
            if submitted.admitted is not None:
                submitted.admitted()

    def _answer(self, submitted: _SubmittedRequest, output: Any) -> int:
        """Answer a finished request that is not aborted; return its token count."""
        cached = output.num_cached_tokens or 0
        result = _result(submitted.request, output.outputs[0], cached)
        if any(map(math.isnan, result.logprobs)):
            return self._fail(submitted, LogitsNotFinite(result.request_id, self.version))
        if self._experts is not None and submitted.request.experts_from is not None:
            found = self._experts(submitted.own_name, submitted.request, output.outputs[0])
            result = replace(result, experts=found)
        self.prompt_tokens.admit(len(submitted.request.prompt_ids), cached)
        if self._open.answer(result.request_id, submitted):
            submitted.done(result)
        return len(result.token_ids)

    def _fail(self, submitted: _SubmittedRequest, error: RequestAborted) -> int:
        if self._open.answer(submitted.request.request_id, submitted):
            submitted.done(error)
        return 0


def _result(request: GenerationRequest, output: Any, cached: int) -> GenerationResult:
    if output.finish_reason not in ("stop", "length"):
        raise EngineFault(f"vLLM gave {request.request_id} up: {output.finish_reason}")
    ids = list(output.token_ids)
    spans = output.weight_versions
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    if not len(ids) == len(output.logprobs.logprobs) == len(versions):
        raise EngineFault(
            f"vLLM answered {request.request_id} with {len(ids)} tokens, "
            f"{len(output.logprobs.logprobs)} log-probs and {len(versions)} versions"
        )
    reason: StopReason = "stop" if ids[-1] in request.stop_ids else "length"
    return GenerationResult(
        request.request_id, ids, list(output.logprobs.logprobs), versions, reason, cached
    )
