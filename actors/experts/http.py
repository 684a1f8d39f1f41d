"""HTTP server of the experts: the part of the OpenAI API that a teacher needs.

    GET  /v1/models
    POST /v1/chat/completions      (not streamed, one choice)

It listens on one address, by default 127.0.0.1, and requires the run's bearer token. It does not
use Monarch.
"""

import hmac
import json
import secrets
from http import HTTPStatus
from typing import Any, Self

from composer_mesh.actors.experts.panel import ExpertPanel, UnknownExpert
from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.mesh.json_server import LOOPBACK, JsonHandler, JsonServer, Refusal
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import code_error

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
        raise _bad(f"the messages are no episode of this task ({problem}): send one") from None
    except BaseException as error:
        if is_interrupt(error):
            raise
        text = str(code_error("the expert of the task", error))
        raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text) from error


def _bad(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text)
