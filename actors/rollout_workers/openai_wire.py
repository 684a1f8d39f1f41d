"""What the APIs of the agent endpoint have in common.

Parameters are used, ignored because a run decides them, or refused; none is left unread.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_mesh.actors.rollout_workers.agent_episode import AgentEpisode, Ask, Exchange
from composer_mesh.configs.validation import first_error, validated
from composer_mesh.mesh.json_server import Refusal
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason

MOST_ANSWERS = 64
"""Answers to one request at most."""
PIECE_CHARS = 24
"""Characters of a streamed piece of text."""
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")

Count = Annotated[int, Field(ge=1, le=2**31)]
Ids = list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]]
Stops = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None

SAMPLING_OF_THE_RUN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Ignored: an agent is trained on what the run's own sampling parameters give."""
WITHOUT_EFFECT = frozenset(
    {
        "client_metadata",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
    | {"safety_identifier", "service_tier", "store", "tool_choice", "user", "verbosity"}
    | {"reasoning_effort", "max_tool_calls", "include", "reasoning"}
)
"""Ignored: they change nothing about a single answer, or ask for what sampling cannot promise."""
IGNORED = SAMPLING_OF_THE_RUN | WITHOUT_EFFECT
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "conversation": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}}, {}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "web_search_options": (),
}
"""Refused with any other value than these and null."""


class WireRequest(BaseModel):
    """The parameters of all APIs."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(default="", max_length=512)
    stream: bool | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None


R = TypeVar("R", bound=WireRequest)


@dataclass(frozen=True)
class WireAnswer(ABC):
    """One request of an agent, read, and how its answer is written."""

    request: WireRequest
    ask: Ask

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    @abstractmethod
    def reply(self, exchange: Exchange) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def events(self, exchange: Exchange) -> Iterable[bytes]:
        """Return the answer as a stream."""

    def waiting(self) -> bytes:
        """Return what a stream sends while its answer is sampled, which clients ignore."""
        return b": sampling\n\n"

    def refused(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream whose answer could not be sampled."""
        return sse(refusal.body())


ReadRequest = Callable[[bytes, AgentEpisode, str], WireAnswer]
"""Reads a request's body, for an episode and a model's name; raises Refusal."""


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request and its answers."""

    prompt: int
    answers: int

    @classmethod
    def of(cls, exchange: Exchange, n: int) -> TokenUsage:
        """Count each prompt once."""
        answers = sum(len(turn.turn.action_ids) for turn in exchange.turns)
        heads = exchange.turns[::n]
        prompts = sum(len(head.token_ids()) - len(head.turn.action_ids) for head in heads)
        return cls(prompts, answers)

    def named(self, prompt: str = "prompt_tokens", answers: str = "completion_tokens") -> Any:
        total = self.prompt + self.answers
        return {prompt: self.prompt, answers: self.answers, "total_tokens": total}


def read_as(
    kind: type[R],
    body: bytes,
    ignored: Collection[str] = IGNORED,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
) -> R:
    """Return a body as a request of a kind; raises Refusal."""
    try:
        request = validated(kind, parsed_json(body))
    except ValidationError as error:
        where = first_error(error)["loc"]
        raise bad_request(short_reason(error), str(where[0]) if where else None) from None
    except ValueError:
        raise bad_request("the body is not JSON: send an object") from None
    check_parameters(request.model_extra or {}, ignored, refused)
    return request


def check_parameters(
    extra: Mapping[str, Any], ignored: Collection[str], refused: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise Refusal for parameters that are neither ignored nor have an accepted value."""
    for name, value in extra.items():
        if value is None or name in ignored:
            continue
        if name not in refused:
            raise bad_request(f"unknown parameter {name[:80]!r}: leave it out", name[:80])
        if value not in refused[name]:
            raise bad_request(f"{name} is not supported here: leave it out", name)


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools of a request as a template reads them; raises Refusal."""
    for tool in tools or []:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f"a tool has the type {tool.get('type')!r}: use functions", "tools")
        if not TOOL_NAME.fullmatch(str(function.get("name", ""))):
            raise bad_request("a tool has no usable name: use letters, digits, _ and -", "tools")
    return tools or []


def stop_strings(stop: Stops) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    return tuple([stop] if isinstance(stop, str) else stop or []) if stop else ()


def bad_request(text: str, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text, code, param)


def pieces(text: str) -> list[str]:
    """Return a text in the pieces in which it is streamed."""
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]


def sse(data: Any, event: str | None = None) -> bytes:
    """Return one server-sent event."""
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
