"""HTTP server of the experts: the part of the OpenAI API that a teacher needs.

    GET  /v1/models
    POST /v1/chat/completions      (not streamed, one choice)

It listens on one address, by default 127.0.0.1, and requires the run's bearer token. It does not
use Monarch.

Rule-based experts with configured error rates, answering as chat completions.

The task defines the correct actions; the panel decides which expert errs where. The draw depends on
the seed, the expert and the conversation, never on order.
"""

import hashlib
import hmac
import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, Self

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.mesh.json_server import LOOPBACK, JsonHandler, JsonServer, Refusal
from composer_mesh.rollouts.hints import HINT_WRITER, builtin_wording
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import code_error

CHARS_PER_TOKEN = 4


class ExpertTask(Protocol):
    """Port to the task that experts act in."""

    def expert(self, messages: list[Message]) -> str: ...

    def corrupted(self, messages: list[Message], rng: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class Expert:
    """A model id of the server, and the fraction of its actions that are wrong on purpose."""

    name: str
    error_rate: float


class UnknownExpert(LookupError):
    """No expert has this name."""


class ExpertPanel:
    """The experts of one run on one task; stateless after construction, hence thread-safe.

    `writes_hints` also serves the builtin hint writer.
    """

    def __init__(
        self,
        task: ExpertTask,
        seed: int,
        experts: Sequence[Expert],
        *,
        writes_hints: bool = False,
    ) -> None:
        for expert in experts:
            if not 0 <= expert.error_rate <= 1:
                raise ValueError(
                    f"error_rate of {expert.name!r} is {expert.error_rate}: give a share in [0, 1]"
                )
        self._task, self._seed, self._writes_hints = task, seed, writes_hints
        self._experts = {expert.name: expert for expert in experts}
        if len(self._experts) != len(experts):
            raise ValueError(f"{len(experts)} experts share names: give each its own")

    @property
    def names(self) -> list[str]:
        return [*self._experts, *([HINT_WRITER] if self._writes_hints else [])]

    def action(self, name: str, messages: list[Message]) -> str:
        """Return the expert's action text; raises the task's error for unreadable messages."""
        if self._writes_hints and name == HINT_WRITER:
            return builtin_wording(messages)
        expert = self._expert(name)
        rng = random.Random(f"{self._seed}:{name}:{fingerprint(messages)}")
        if rng.random() < expert.error_rate:
            return self._task.corrupted(messages, rng)
        return self._task.expert(messages)

    def completion(self, name: str, messages: list[Message]) -> dict[str, Any]:
        """Return the expert's action as an OpenAI chat completion; tokens are estimated, cost 0."""
        text = self.action(name, messages)
        digest = hashlib.sha256(f"{name}:{fingerprint(messages)}".encode()).hexdigest()
        message = assistant_message(text, f"call_{digest[:16]}")
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {
            "id": f"chatcmpl-{digest[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": name,
            "choices": [choice],
            "usage": _usage(messages, text),
        }

    def models(self) -> dict[str, Any]:
        """Return the experts as an OpenAI list of models."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "composer-mesh"}
            for name in self.names
        ]
        return {"object": "list", "data": data}

    def _expert(self, name: str) -> Expert:
        if name not in self._experts:
            raise UnknownExpert(f"model {name!r} is not served: ask {', '.join(self.names)}")
        return self._experts[name]


def fingerprint(messages: Sequence[Message]) -> str:
    """Return a hash of texts and calls, without call ids, which providers choose."""
    said = [
        [m.get("role"), m.get("content") or "", [c["function"] for c in m.get("tool_calls") or []]]
        for m in messages
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _usage(messages: Sequence[Message], text: str) -> dict[str, Any]:
    prompt = -(-len(json.dumps(list(messages))) // CHARS_PER_TOKEN)
    written = -(-len(text) // CHARS_PER_TOKEN)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "cost": 0.0,
    }


LARGEST_REQUEST = 4 * 2**20
TOKEN_ENV = "COMPOSER_MESH_EXPERT_TOKEN"
"""The name of the token among the `Keys` of an actor that queries builtin teachers."""


def new_token() -> str:
    """Return a new bearer token for one run."""
    return secrets.token_urlsafe(32)


class ExpertServer:
    """Serves a panel on its own port and threads, from `start` to `close`.

    Port 0 lets the system choose one.
    """

    def __init__(
        self, panel: ExpertPanel, token: str, port: int = 0, address: str = LOOPBACK
    ) -> None:
        if not token:
            raise ValueError("the token is empty: pass new_token()")
        self._http = _Server(panel, token, (address, port))

    @property
    def base_url(self) -> str:
        return f"{self._http.origin}/v1"

    def start(self) -> Self:
        self._http.start()
        return self

    def close(self) -> None:
        """Close all connections. Waits until the server's threads have ended."""
        self._http.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(JsonServer):
    def __init__(self, panel: ExpertPanel, token: str, address: tuple[str, int]) -> None:
        self.panel, self.token = panel, token
        super().__init__(_Handler, address)


class _Handler(JsonHandler):
    server: _Server
    server_version = "composer-mesh-experts"
    largest_request = LARGEST_REQUEST

    def authorize(self) -> None:
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise Refusal(HTTPStatus.UNAUTHORIZED, "send the run's bearer token", "invalid_api_key")

    def respond(self, route: str, body: bytes) -> dict[str, Any]:
        if route == "GET /v1/models":
            return self.server.panel.models()
        if route == "POST /v1/chat/completions":
            model, messages = _read_request(body)
            return _complete(self.server.panel, model, messages)
        raise Refusal(HTTPStatus.NOT_FOUND, f"no route {route!r}: POST /v1/chat/completions")


def _read_request(body: bytes) -> tuple[str, list[Message]]:
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise _bad("the body is not JSON: send an object") from None
    if not isinstance(request, dict) or not isinstance(request.get("model"), str):
        raise _bad('send an object with a string "model"')
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad('send a list "messages" of at least one message')
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise _bad('each message needs a string "role"')
    if request.get("stream") or request.get("n") not in (None, 1):
        raise _bad("answers are not streamed and come one at a time: leave out stream and n")
    return request["model"], messages


def _complete(panel: ExpertPanel, model: str, messages: list[Message]) -> dict[str, Any]:
    try:
        return panel.completion(model, messages)
    except UnknownExpert as unknown:
        raise Refusal(HTTPStatus.NOT_FOUND, str(unknown), "model_not_found") from None
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as problem:
        raise _bad(f"the messages are not an episode of this task ({problem}): send one") from None
    except BaseException as error:
        if is_interrupt(error):
            raise
        text = str(code_error("the expert of the task", error))
        raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text) from error


def _bad(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text)
