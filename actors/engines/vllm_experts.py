"""The experts that vLLM chose for the tokens of a request, as its engine asks for them.

On GPUs vLLM returns them itself, from its second model runner. That needs Triton, so that on CPUs
our worker notes them. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_mesh.actors.engines.vllm_engine import EngineFault
from composer_mesh.actors.engines.vllm_installed import VllmUnavailable
from composer_mesh.actors.engines.vllm_worker import CHOSEN_EXPERTS, NOTE_EXPERTS
from composer_mesh.actors.models.expert_routing import choices_of, expert_sizes, router_names
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.planning.model_refusals import UnsupportedRouting
from composer_mesh.rollouts.expert_choices import ExpertChoices
from composer_mesh.rollouts.generation import GenerationRequest

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

    def choices(self, request: GenerationRequest, tokens: int, found: Any) -> ExpertChoices:
        """Return the experts [positions, layers, per_token] of an answer of so many `tokens`.

        Raises `EngineFault` if they are not those of the positions that the request asks for.
        """
        start = request.experts_from or 0
        shape = (len(request.prompt_ids) + tokens - 1 - start, len(self.numbers), self.per_token)
        if found.shape != shape:
            raise EngineFault(
                f"vLLM told the experts {[*found.shape]} (positions, layers, experts of a token) "
                f"of {request.request_id}, which are {[*shape]}"
            )
        return choices_of(found, self.config)


class NotedExperts:
    """The experts that our worker's routers told it, on a CPU."""

    def __init__(self, call: Callable[..., Sequence[Any]], layers: ExpertLayers) -> None:
        """`call` calls a method of every worker of an engine."""
        self._call, self._layers = call, layers
        call(NOTE_EXPERTS, args=(layers.numbers, layers.per_token))

    def __call__(self, name: str, request: GenerationRequest, output: Any) -> ExpertChoices:
        tokens = len(output.token_ids)
        end = len(request.prompt_ids) + tokens - 1
        first, *_ = self._call(CHOSEN_EXPERTS, args=(name, request.experts_from or 0, end))
        return self._layers.choices(request, tokens, first)


class ReturnedExperts:
    """The experts that vLLM returns with an answer [positions, decoder layers, per_token].

    Dense layers have rows too, which mean nothing.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        self._layers = layers

    def __call__(self, _: str, request: GenerationRequest, output: Any) -> ExpertChoices:
        if output.routed_experts is None:
            raise EngineFault(f"vLLM told no experts of {request.request_id}")
        numbers = torch.as_tensor(output.routed_experts.astype("int32"))
        chosen = numbers[:, self._layers.numbers]
        return self._layers.choices(request, len(output.token_ids), chosen)


def refuse_without_experts(version: str, sampling: Any) -> None:
    """Raise `VllmUnavailable` where a vLLM cannot tell the experts of a part of a request.

    `sampling` is its class `SamplingParams`.
    """
    if not hasattr(sampling, PROMPT_START):
        raise VllmUnavailable(
            f"trainer.moe.router_replay is true but vLLM {version} has no "
            f"SamplingParams.{PROMPT_START} and cannot tell the experts of a part of a request: "
            "install vLLM 0.32.0, or set router_replay to false"
        )
