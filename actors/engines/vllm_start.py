"""Starts vLLM in this process, from the config; imports it. The imports take seconds.

The experts that vLLM chose for the tokens of a request, as its engine asks for them.

On GPUs vLLM returns them itself, from its second model runner. That needs Triton, so that on CPUs
our worker notes them. Does not import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.engines.vllm_engine import (
    EngineFault,
    Experts,
    RequestLimits,
    Sampling,
    VllmEngine,
)
from composer_mesh.actors.engines.vllm_settings import (
    VllmUnavailable,
    adapter_arguments,
    engine_argument_names,
    engine_arguments,
    expert_arguments,
    flavour_of,
    refuse_unknown,
    snapshot_arguments,
)
from composer_mesh.actors.engines.vllm_weights import (
    AdapterSlots,
    VllmAdapters,
    VllmWeights,
    adapter_shapes,
)
from composer_mesh.actors.engines.vllm_worker import CHOSEN_EXPERTS, NOTE_EXPERTS
from composer_mesh.actors.models.expert_routing import choices_of, expert_sizes, router_names
from composer_mesh.actors.models.language_model import layer_kinds
from composer_mesh.actors.models.lora import adapted_layer_names
from composer_mesh.actors.models.policy import CheckpointNames
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_facts import ATTENTION_KINDS
from composer_mesh.planning.model_refusals import UnsupportedRouting
from composer_mesh.rollouts.generation import GenerationRequest
from composer_mesh.rollouts.traces import ExpertChoices

PROMPT_START = "routed_experts_prompt_start"
"""vLLM's parameter of a request for the position from which on it returns experts."""


@dataclass(frozen=True)
class ExpertLayers:
    """The decoder layers of a mixture that have experts, in order, and the experts of a token."""

    numbers: list[int]
    per_token: int
    config: Any

    @classmethod
    def of(cls, model: Any) -> ExpertLayers | None:
        """Return those of a model of transformers, which may have no weights; None if it is dense.

        Raises `UnsupportedRouting` for a mixture that the trainer could not replay.
        """
        sizes = expert_sizes(model.config)
        if sizes is None:
            return None
        names = router_names(model)
        if not names:
            raise UnsupportedRouting(type(model).__name__, "no router of it was found")
        layers = decoder_layers(model)
        whole = next(name for name, module in model.named_modules() if module is layers)
        numbers = [int(name.removeprefix(f"{whole}.").partition(".")[0]) for name in names]
        return cls(numbers, sizes[1], model.config)

    def noting(self, call: Callable[..., Sequence[Any]]) -> Experts:
        """Return what asks our worker for the experts of an answer, which it notes on a CPU.

        `call` calls a method of every worker of an engine.
        """
        call(NOTE_EXPERTS, args=(self.numbers, self.per_token))

        def noted(name: str, request: GenerationRequest, output: Any) -> ExpertChoices:
            end = len(request.prompt_ids) + len(output.token_ids) - 1
            first, *_ = call(CHOSEN_EXPERTS, args=(name, request.experts_from or 0, end))
            return self._choices(request, output, first)

        return noted

    def returned(self, _: str, request: GenerationRequest, output: Any) -> ExpertChoices:
        """Return the experts that vLLM gives with an answer [positions, decoder layers, per_token].

        Dense layers have rows too, which mean nothing.
        """
        if output.routed_experts is None:
            raise EngineFault(f"vLLM reported no experts of {request.request_id}")
        numbers = torch.as_tensor(output.routed_experts.astype("int32"))
        return self._choices(request, output, numbers[:, self.numbers])

    def _choices(self, request: GenerationRequest, output: Any, found: Any) -> ExpertChoices:
        """Return the experts [positions, layers, per_token] of an answer.

        Raises `EngineFault` if they are not those of the positions that the request asks for.
        """
        end = len(request.prompt_ids) + len(output.token_ids) - 1
        shape = (end - (request.experts_from or 0), len(self.numbers), self.per_token)
        if found.shape != shape:
            raise EngineFault(
                f"vLLM reported the experts {[*found.shape]} (positions, layers, experts of a "
                f"token) of {request.request_id}, which are {[*shape]}"
            )
        return choices_of(found, self.config)


def refuse_without_experts(version: str, sampling: Any) -> None:
    """Raise `VllmUnavailable` where a vLLM cannot tell the experts of a part of a request.

    `sampling` is its class `SamplingParams`.
    """
    if not hasattr(sampling, PROMPT_START):
        raise VllmUnavailable(
            f"trainer.moe.router_replay is true but vLLM {version} has no "
            f"SamplingParams.{PROMPT_START} and cannot report the experts of a part of a request: "
            "install vLLM 0.32.0, or set router_replay to false"
        )


SEEDS = 2**63


@dataclass(frozen=True)
class _Started:
    llm: Any
    checkpoint: CheckpointNames
    limits: RequestLimits
    experts: Experts | None


def start(config: Config, folder: Path) -> VllmEngine:
    """Start an engine that serves the model of `folder` as version 0.

    Raises vLLM's errors where it cannot serve the model.
    """
    from vllm.lora.request import LoRARequest

    lora = config.trainer.lora if config.syncs_adapters else None
    more = {} if lora is None else adapter_arguments(lora.rank)
    started = _start(config, folder, more, config.trainer.moe.router_replay)
    llm, checkpoint, limits = started.llm, started.checkpoint, started.limits
    if lora is not None:
        layers = adapted_layer_names(checkpoint.model, lora.targets)
        shapes = adapter_shapes(checkpoint.model, layers, lora.rank)
        adapters = VllmAdapters(llm, LoRARequest, lora, shapes)
        return VllmEngine(
            llm,
            sampling_parameters(),
            adapters.update,
            limits,
            adapters.of_request,
            started.experts,
        )
    weights = VllmWeights(
        llm.collective_rpc,
        checkpoint.expected,
        tied=bool(llm.model_config.hf_text_config.tie_word_embeddings),
        here=config.generator.vllm.tensor_parallel == 1,
        converted=checkpoint.converted,
    )
    return VllmEngine(llm, sampling_parameters(), weights.update, limits, experts=started.experts)


def start_for_snapshots(config: Config, folder: Path) -> tuple[VllmEngine, AdapterSlots]:
    """Start an engine of the model of `folder` that serves clients' adapters from the slots."""
    from vllm.lora.request import LoRARequest

    started = _start(config, folder, snapshot_arguments(config.serve))
    slots = AdapterSlots(started.llm, LoRARequest)
    engine = VllmEngine(
        started.llm, sampling_parameters(), _refuse_weights, started.limits, slots.of_request
    )
    return engine, slots


def _refuse_weights(weights: Any) -> None:
    raise RuntimeError(f"an engine of snapshots has no versions, but got {weights.version}")


def _start(
    config: Config, folder: Path, more: Mapping[str, Any], tells_experts: bool = False
) -> _Started:
    # vLLM warns that Triton is missing, which is not needed on a CPU.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    from vllm import EngineArgs, SamplingParams
    from vllm import __version__ as version
    from vllm.v1.engine.llm_engine import LLMEngine

    # Before vLLM starts: it changes some classes of transformers, which then cannot be built.
    checkpoint = CheckpointNames(folder)
    kinds = layer_kinds(checkpoint.model.config)
    arguments = engine_arguments(config, folder, states=bool(set(kinds) - ATTENTION_KINDS))
    refuse_unknown(config.generator.vllm.engine_args, engine_argument_names())
    layers = ExpertLayers.of(checkpoint.model) if tells_experts else None
    if layers is not None:
        refuse_without_experts(version, SamplingParams)
        arguments |= expert_arguments(config)
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments, **more))
    limits = RequestLimits(
        config.policy.max_context,
        llm.model_config.get_vocab_size(),
        config.generator.max_concurrent,
    )
    experts: Experts | None = None
    if layers is not None:
        on_cpu = flavour_of(config) == "cpu"
        experts = layers.noting(llm.collective_rpc) if on_cpu else layers.returned
    return _Started(llm, checkpoint, limits, experts)


def sampling_parameters() -> Sampling:
    """Return a converter of requests to vLLM's parameters, without vLLM's own defaults."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def sampling(request: GenerationRequest) -> Any:
        prompt, start = len(request.prompt_ids), request.experts_from
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.truncation.top_p,
            top_k=request.truncation.top_k,
            min_p=request.truncation.min_p,
            seed=request.seed % SEEDS,
            max_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_ids,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=prompt if start is None else start,
        )

    return sampling
