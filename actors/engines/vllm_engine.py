"""vLLM behind the engine interface: token ids in, token ids with log-probs and versions out.

`vllm_settings` configures it, `vllm_weights` updates its weights. Only `start` imports vLLM: the
rest works with any object that steps like its `LLMEngine`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from composer_mesh.actors.engines.port import Done, Weights, refuse_too_long
from composer_mesh.actors.engines.vllm_settings import engine_arguments, refuse_unknown
from composer_mesh.actors.engines.vllm_weights import VllmWeights, checkpoint_names
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import StopReason

Sampling = Callable[[GenerationRequest], Any]
Update = Callable[[Weights], None]
SEEDS = 2**63


class EngineFault(RuntimeError):
    """vLLM violated an invariant; its engine must not be used any more."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request: tokens of prompt and answer together, and ids below `vocabulary`."""

    length: int
    vocabulary: int


class VllmEngine:
    """Serves requests with vLLM's scheduler; every token is labelled with its policy version."""

    def __init__(self, llm: Any, sampling: Sampling, update: Update, limits: Limits) -> None:
        """`llm` steps as vLLM's `LLMEngine`; `sampling` converts a request to its parameters."""
        self._llm, self._sampling, self._update, self._limits = llm, sampling, update, limits
        self._waiting: SimpleQueue[tuple[GenerationRequest, Done]] = SimpleQueue()
        self._running: dict[str, tuple[GenerationRequest, Done]] = {}
        self._names = count()
        self._label(0)

    @property
    def busy(self) -> bool:
        return bool(self._running) or not self._waiting.empty()

    @property
    def outstanding(self) -> int:
        return self._waiting.qsize() + len(self._running)

    def submit(self, request: GenerationRequest, done: Done) -> None:
        """Queue a request; `done` is called from within a later `step`."""
        refuse_too_long(request, self._limits.length)
        ids, largest = request.prompt_ids, self._limits.vocabulary - 1
        if not ids or not 0 <= min(ids) <= max(ids) <= largest:
            raise ValueError(
                f"{request.request_id} has {len(ids)} prompt ids but needs at least one, all of "
                f"them from 0 to {largest}: use the tokenizer of the policy's folder"
            )
        self._waiting.put((request, done))

    def step(self) -> int:
        """Admit requests and decode; return the token count of the requests answered."""
        self._admit()
        sampled = 0
        for output in self._llm.step():
            if output.finished:
                request, done = self._running.pop(output.request_id)
                result = _result(request, output.outputs[0])
                sampled += len(result.token_ids)
                done(result)
        return sampled

    def swap(self, weights: Weights) -> None:
        """Load new weights and invalidate everything cached with the old ones."""
        self._update(weights)
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineFault(
                f"vLLM kept cached keys and values of version {self.version} under the weights of "
                f"version {weights.version}: its answers would belong to neither"
            )
        self._label(weights.version)

    def close(self) -> None:
        """Shut down workers in other processes; everything else ends with this process."""
        self._llm.model_executor.shutdown()

    def _label(self, version: int) -> None:
        self.version = version
        self._llm.set_weight_version(str(version))

    def _admit(self) -> None:
        while True:
            try:
                request, done = self._waiting.get_nowait()
            except Empty:
                return
            name = str(next(self._names))
            self._running[name] = (request, done)
            prompt = {"prompt_token_ids": request.prompt_ids}
            self._llm.add_request(name, prompt, self._sampling(request))


def start(config: Config, folder: Path) -> VllmEngine:
    """Start an engine in this process that serves the model of `folder` as version 0.

    The imports take seconds. Raises vLLM's errors where it cannot serve the model.
    """
    # vLLM warns that Triton is missing, which is not needed on a CPU.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(config, folder)
    refuse_unknown(config.generator.vllm.engine_args, [field.name for field in fields(EngineArgs)])
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    model = llm.model_config
    weights = VllmWeights(
        llm.collective_rpc,
        checkpoint_names(folder),
        tied=bool(model.hf_text_config.tie_word_embeddings),
        here=config.generator.vllm.tensor_parallel == 1,
    )
    limits = Limits(config.policy.max_context, model.get_vocab_size())
    return VllmEngine(llm, sampling_parameters(), weights.update, limits)


def sampling_parameters() -> Sampling:
    """Return a converter of requests to vLLM's parameters, without vLLM's own defaults."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def sampling(request: GenerationRequest) -> Any:
        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed % SEEDS,
            max_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_ids,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    return sampling


def _result(request: GenerationRequest, output: Any) -> GenerationResult:
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
        request.request_id, ids, list(output.logprobs.logprobs), versions, reason
    )
