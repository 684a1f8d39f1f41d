"""`/v1/chat/completions`: what agents send, and what they get, also as a stream.

`/v1/completions`: agents that render their conversation themselves, as text or token ids.

`/inference/v1/generate` of vLLM: token ids in, token ids out. verifiers and prime-rl render
conversations themselves and sample by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    Exchange,
    TextQuestion,
)
from composer_mesh.actors.rollout_workers.openai_wire import (
    DONE,
    MOST_ANSWERS,
    SAMPLING_OF_THE_RUN,
    Count,
    Ids,
    Stops,
    StreamOptions,
    TokenUsage,
    WireAnswer,
    WireRequest,
    bad_request,
    check_parameters,
    checked_tools,
    pieces,
    read_as,
    sse,
    stop_strings,
)
from composer_mesh.rollouts.captured_turns import CapturedTurn


class CompletionRequest(WireRequest):
    prompt: str | Ids | list[str] | list[Ids]
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stop: Stops = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True)
class CompletionAnswer(WireAnswer):
    """A request for completions, read."""

    request: CompletionRequest
    model: str
    decode: Any

    @classmethod
    def read(cls, body: bytes, episode: AgentEpisode, model: str) -> CompletionAnswer:
        request = read_as(CompletionRequest, body)
        questions = [TextQuestion(given) for given in _prompts(request.prompt)]
        n = request.n or 1
        if not 1 <= len(questions) * n <= MOST_ANSWERS:
            raise bad_request(f"ask for 1 to {MOST_ANSWERS} answers at once", "prompt")
        ask = Ask(questions, n, request.max_tokens, stop_strings(request.stop))
        return cls(request, ask, request.model or model, episode.token_text)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        turns = enumerate(exchange.turns)
        choices = [self._choice(turn, at, turn.answer["content"], end=True) for at, turn in turns]
        usage = TokenUsage.of(exchange, self.ask.n).named()
        return {**self._head(exchange), "choices": choices, "usage": usage}

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        """Yield the chunks of a stream: pieces of text, end, usage."""
        options, head = self.request.stream_options, self._head(exchange)
        for index, turn in enumerate(exchange.turns):
            for piece in pieces(turn.answer["content"]):
                yield sse({**head, "choices": [self._choice(turn, index, piece, end=False)]})
            yield sse({**head, "choices": [self._choice(turn, index, "", end=True)]})
        if options is not None and options.include_usage:
            yield sse({**head, "choices": [], "usage": TokenUsage.of(exchange, self.ask.n).named()})
        yield DONE

    def _head(self, exchange: Exchange) -> dict[str, Any]:
        return {
            "id": f"cmpl-{exchange.id}",
            "object": "text_completion",
            "created": exchange.created,
            "model": self.model,
        }

    def _choice(self, turn: CapturedTurn, index: int, text: str, *, end: bool) -> dict[str, Any]:
        with_ids = end and self.request.return_token_ids
        return {
            "index": index,
            "text": text,
            "finish_reason": turn.finish if end else None,
            "logprobs": self._logprobs(turn) if end else None,
            **({"token_ids": turn.turn.action_ids} if with_ids else {}),
        }

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        tokens = [self.decode(i) for i in turn.turn.action_ids]
        offsets = [0, *accumulate(map(len, tokens))][:-1]
        return {
            "tokens": tokens,
            "token_logprobs": turn.turn.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a request: one text, one list of ids, or several of a kind."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


class WireMessage(BaseModel):
    """The shape of a message; which fields count is decided where messages are compared."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(WireRequest):
    messages: list[WireMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    stop: Stops = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True)
class ChatAnswer(WireAnswer):
    """A request for chat completions, read."""

    request: ChatRequest
    model: str
    decode: Any

    @classmethod
    def read(cls, body: bytes, episode: AgentEpisode, model: str) -> ChatAnswer:
        request = read_as(ChatRequest, body)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        limits = [request.max_completion_tokens, request.max_tokens]
        ask = Ask(
            [ChatQuestion(messages, checked_tools(request.tools))],
            request.n or 1,
            min((limit for limit in limits if limit is not None), default=None),
            stop_strings(request.stop),
        )
        return cls(request, ask, request.model or model, episode.token_text)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        choices = [self._choice(turn, at) for at, turn in enumerate(exchange.turns)]
        usage = TokenUsage.of(exchange, self.ask.n).named()
        return {**self._head(exchange, "chat.completion"), "choices": choices, "usage": usage}

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        """Yield the chunks of a stream: role, pieces of text, calls, end, usage."""
        options = self.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = self._head(exchange, "chat.completion.chunk")
        if with_usage:
            head["usage"] = None
        for index, turn in enumerate(exchange.turns):
            for chunk in self._chunks(turn):
                yield sse({**head, "choices": [{"index": index, **chunk}]})
        if with_usage:
            yield sse({**head, "choices": [], "usage": TokenUsage.of(exchange, self.ask.n).named()})
        yield DONE

    def _head(self, exchange: Exchange, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{exchange.id}",
            "object": kind,
            "created": exchange.created,
            "model": self.model,
        }

    def _choice(self, turn: CapturedTurn, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "message": {**turn.answer, "refusal": None},
            "logprobs": self._logprobs(turn),
            "finish_reason": finish_reason(turn),
            **self._ids(turn),
        }

    def _chunks(self, turn: CapturedTurn) -> Iterator[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        yield {"delta": first, "logprobs": self._logprobs(turn), "finish_reason": None}
        for delta in _deltas(turn):
            yield {"delta": delta, "logprobs": None, "finish_reason": None}
        end = finish_reason(turn)
        yield {"delta": {}, "logprobs": None, "finish_reason": end, **self._ids(turn)}

    def _ids(self, turn: CapturedTurn) -> dict[str, Any]:
        return {"token_ids": turn.turn.action_ids} if self.request.return_token_ids else {}

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        sampled = zip(turn.turn.action_ids, turn.turn.logprobs, strict=True)
        return {"content": [token_logprob(self.decode(i), logprob) for i, logprob in sampled]}


def _deltas(turn: CapturedTurn) -> Iterator[dict[str, Any]]:
    for piece in pieces(turn.answer.get("reasoning_content") or ""):
        yield {"reasoning_content": piece}
    for piece in pieces(turn.answer["content"] or ""):
        yield {"content": piece}
    for index, call in enumerate(turn.answer.get("tool_calls", [])):
        function = {**call["function"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": function}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def finish_reason(turn: CapturedTurn) -> str:
    """Return why an answer ended, as the API names it."""
    return "tool_calls" if turn.answer.get("tool_calls") else turn.finish


def token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """Return one sampled token with its log-prob; others are not offered."""
    written = list(text.encode(errors="replace"))
    return {"token": text, "logprob": logprob, "bytes": written, "top_logprobs": []}


MOST_STOP_IDS = 256

GENERATE_IGNORED = SAMPLING_OF_THE_RUN | frozenset(
    {"cache_salt", "detokenize", "priority", "request_id", "routed_experts_prompt_start"}
    | {"skip_special_tokens", "spaces_between_special_tokens", "reasoning_effort"}
)
"""Ignored: the run decides about sampling; the others concern text, caches and queues."""
GENERATE_REFUSED: dict[str, tuple[Any, ...]] = {
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
class GenerateAnswer(WireAnswer):
    """A request for ids, read."""

    request: GenerateRequest

    @classmethod
    def read(cls, body: bytes, _episode: AgentEpisode, _model: str) -> GenerateAnswer:
        request = read_as(GenerateRequest, body, GENERATE_IGNORED, GENERATE_REFUSED)
        parameters = request.sampling_params
        check_parameters(parameters.model_extra or {}, GENERATE_IGNORED, GENERATE_REFUSED)
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
