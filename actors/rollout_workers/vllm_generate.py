"""`/inference/v1/generate` of vLLM: token ids in, token ids out.

verifiers and prime-rl render conversations themselves and sample by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    Exchange,
    TextQuestion,
)
from composer_mesh.actors.rollout_workers.openai_wire import (
    MOST_ANSWERS,
    SAMPLING_OF_THE_RUN,
    Count,
    Ids,
    Stops,
    TokenUsage,
    WireRequest,
    bad_request,
    check_parameters,
    read_as,
    stop_strings,
)
from composer_mesh.rollouts.captured_turns import CapturedTurn

MOST_STOP_IDS = 256

IGNORED = SAMPLING_OF_THE_RUN | frozenset(
    {"cache_salt", "detokenize", "priority", "request_id", "routed_experts_prompt_start"}
    | {"skip_special_tokens", "spaces_between_special_tokens", "reasoning_effort"}
)
"""Ignored: the run decides about sampling; the others concern text, caches and queues."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "content_parts": ([],),
    "features": (),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}
"""Refused with any other value than these and null."""


class GenerateSampling(BaseModel):
    model_config = ConfigDict(extra="allow")

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Count | None = None
    stop: Stops = None
    stop_token_ids: Annotated[Ids, Field(max_length=MOST_STOP_IDS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateRequest(WireRequest):
    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateSampling
    return_token_ids: bool | None = None


@dataclass(frozen=True)
class GenerateAnswer:
    """A request for ids, read."""

    request: GenerateRequest
    ask: Ask

    @classmethod
    def read(cls, body: bytes, _episode: AgentEpisode, _model: str) -> GenerateAnswer:
        request = read_as(GenerateRequest, body, IGNORED, REFUSED)
        parameters = request.sampling_params
        check_parameters(parameters.model_extra or {}, IGNORED, REFUSED)
        if request.stream:
            raise bad_request("ids are not streamed: leave stream out", "stream")
        ask = Ask(
            [TextQuestion(request.token_ids)],
            parameters.n or 1,
            parameters.max_tokens,
            stop_strings(parameters.stop),
            tuple(parameters.stop_token_ids or ()),
        )
        return cls(request, ask)

    @property
    def stream(self) -> bool:
        return False

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        choices = [self._choice(turn, at) for at, turn in enumerate(exchange.turns)]
        usage = TokenUsage.of(exchange, self.ask.n).named()
        return {"request_id": exchange.id, "choices": choices, "usage": usage}

    def events(self, _exchange: Exchange) -> Iterable[bytes]:
        """Return nothing: streams of ids are refused."""
        return ()

    def _choice(self, turn: CapturedTurn, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": turn.turn.action_ids,
            "finish_reason": turn.finish,
            "logprobs": self._logprobs(turn),
        }

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        if self.request.sampling_params.logprobs is None:
            return None
        sampled = zip(turn.turn.action_ids, turn.turn.logprobs, strict=True)
        return {"content": [{"token": f"token_id:{i}", "logprob": value} for i, value in sampled]}
