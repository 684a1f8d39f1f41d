"""The endpoint that captures agents, one base URL for each episode.

    agent -- /e/TOKEN/v1/chat/completions | completions | responses | messages --> AgentEpisode
    agent -- /e/TOKEN/inference/v1/generate --> AgentEpisode

It listens on 127.0.0.1 only. The base URL and the API key of an episode cannot be guessed, and both
are needed. Requests are read and answers written on threads; sampling is on the event loop that
started the endpoint. Workflows see it as a `CapturedAgent` in each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Self, TypeVar

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    AnswerLog,
    EpisodeEnded,
    Exchange,
    NoRoomForAnswer,
    TooManyTurns,
)
from composer_mesh.actors.rollout_workers.anthropic_messages import (
    CountRequest,
    MessagesAnswer,
    error_body,
)
from composer_mesh.actors.rollout_workers.openai_chat import (
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
)
from composer_mesh.actors.rollout_workers.openai_responses import ResponsesAnswer
from composer_mesh.actors.rollout_workers.openai_wire import (
    ReadRequest,
    WireAnswer,
    bad_request,
    read_as,
)
from composer_mesh.mesh.json_server import LOOPBACK, JsonHandler, JsonServer, Refusal
from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.captured_turns import CapturedTrajectory
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Generation, Sample, Sampling
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.workflow import Trajectory

RETRY_WAIT_S = 10.0
"""Seconds for which a request without a connection is sampled on; the client of OpenAI waits up to
8 before it tries again."""
STREAM_WAIT_S = 5.0
"""Seconds after which a stream begins without its answer, and between the signs that it lives.
Errors until then have a status of their own."""
LARGEST_REQUEST = 8 * 2**20
MOST_ENDED = 4096
"""Ended episodes whose requests are answered as such."""
APIS: dict[str, ReadRequest] = {
    "POST v1/chat/completions": ChatAnswer.read,
    "POST v1/completions": CompletionAnswer.read,
    "POST v1/responses": ResponsesAnswer.read,
    "POST v1/messages": MessagesAnswer.read,
    "POST inference/v1/generate": GenerateAnswer.read,
}
COUNT_TOKENS = "POST v1/messages/count_tokens"
RETRY_HEADER = "x-stainless-retry-count"
SESSION_HEADER = "x-session-id"
KEY_HEADER = "x-api-key"
"""In which clients of Anthropic send the key."""
LONGEST_SESSION = 256


R = TypeVar("R")


class AgentEndpoint:
    """Serves agents from `start` to `close`, both on the event loop that samples."""

    def __init__(
        self,
        generation: Generation,
        chat: ChatFormat,
        vocabulary: int,
        *,
        model: str = "policy",
        retry_wait_s: float = RETRY_WAIT_S,
        stream_wait_s: float = STREAM_WAIT_S,
    ) -> None:
        """Token ids are below `vocabulary`; `model` is the name under `/v1/models`."""
        self._stream_wait_s = stream_wait_s
        self._generation, self._chat, self._vocabulary = generation, chat, vocabulary
        self._model, self._retry_wait_s = model, retry_wait_s
        self._server: _Server | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> Self:
        """Probe the chat template and listen on a free port of 127.0.0.1, unless it serves."""
        async with self._starting:
            if self._server is None:
                of = CaptureFormat.of
                self._format = await asyncio.to_thread(of, self._chat, self._vocabulary)
                loop = asyncio.get_running_loop()
                self._server = _Server(loop, self._model, self._stream_wait_s)
                self._server.start()
        return self

    async def close(self) -> None:
        """Close all connections. Waits until no request is under way."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @asynccontextmanager
    async def episode(
        self, sample: Sample, sampling: Sampling, log: AnswerLog | None = None
    ) -> AsyncIterator[AgentEpisode]:
        """Serve one attempt at a sample until the context ends, which ends its requests.

        Every answer is sampled with `sampling`, whatever a request asks for. With a `log` it is
        recorded; a record that another worker has left is continued, under the same keys.
        """
        server = self._server
        if server is None:
            raise RuntimeError("the endpoint does not serve: call start first")
        ports = self._format, self._generation
        episode = AgentEpisode(*ports, sample, sampling, self._retry_wait_s, log)
        keys = f"{secrets.token_urlsafe(32)} {secrets.token_urlsafe(32)}"
        if log is not None:
            if log.record is not None:
                keys = log.record.agent.decode()
                await episode.restore(log.record)
            log.agent = keys.encode()
        token, episode.api_key = keys.split()
        episode.base_url = f"{server.origin}/e/{token}/v1"
        server.episodes[token] = episode
        try:
            yield episode
        finally:
            server.end(token)
            await episode.close()


class _Server(JsonServer):
    def __init__(self, loop: asyncio.AbstractEventLoop, model: str, stream_wait_s: float) -> None:
        self.loop, self.model, self.stream_wait_s = loop, model, stream_wait_s
        self.episodes: dict[str, AgentEpisode] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        super().__init__(_Handler, (LOOPBACK, 0))

    def end(self, token: str) -> None:
        """Forget an episode but for the fact that it has ended."""
        del self.episodes[token]
        self._ended[_digest(token)] = None
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def has_ended(self, token: str) -> bool:
        return _digest(token) in self._ended


class _Handler(JsonHandler):
    server: _Server
    server_version = "composer-mesh-agents"
    largest_request = LARGEST_REQUEST
    episode: AgentEpisode
    _streaming = False
    """Whether a stream has begun and not ended."""

    def authorize(self) -> None:
        token = self._token_and_route(self.path)[0]
        if token not in self.server.episodes:
            if self.server.has_ended(token):
                raise _ended()
            raise Refusal(HTTPStatus.NOT_FOUND, "no such episode", "episode_not_found")
        self.episode = self.server.episodes[token]
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (self.headers.get(KEY_HEADER) or bearer).encode(errors="replace")
        if not hmac.compare_digest(given, self.episode.api_key.encode()):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, "send the API key of the episode", "invalid_api_key"
            )

    def client(self) -> str:
        return self._token_and_route(self.path)[0]

    def respond(self, route: str, body: bytes) -> dict[str, Any] | None:
        method, _, path = route.partition(" ")
        name = f"{method} {self._token_and_route(path)[1]}"
        if name == "GET v1/models":
            return _models(self.server.model, self.episode.max_context)
        if name == COUNT_TOKENS:
            counting = self.episode.prompt_tokens(
                read_as(CountRequest, body).question(), self._session()
            )
            return {"input_tokens": self._awaited(counting)}
        if name not in APIS:
            raise Refusal(HTTPStatus.NOT_FOUND, f"no route {name!r}: one of {', '.join(APIS)}")
        answer = APIS[name](body, self.episode, self.server.model)
        key = hashlib.sha256(f"{name} ".encode() + body).digest()
        retry = self.headers.get(RETRY_HEADER, "0") not in ("", "0")
        answering = self.episode.answer(answer.ask, key, retry, self._session())
        asking = _while_connected(self.connection, answering)
        future = asyncio.run_coroutine_threadsafe(asking, self.server.loop)
        try:
            if answer.stream:
                self._send_signs_of_life(answer, future)
            exchange = self._result(future)
        except Refusal as refusal:
            if not self._streaming:
                raise
            self._send_chunks([answer.refused(refusal)], last=True)
            return None
        sent = False
        try:
            if answer.stream:
                self._send_chunks(answer.events(exchange), last=True)
            else:
                self.send_json(HTTPStatus.OK, answer.reply(exchange))
            sent = True
        finally:
            self.server.loop.call_soon_threadsafe(self.episode.release, exchange, sent)
        return None

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        of_anthropic = self._token_and_route(self.path)[1].startswith("v1/messages")
        return error_body(refusal) if of_anthropic else refusal.body()

    def _token_and_route(self, path: str) -> tuple[str, str]:
        """Return the token and the rest of `/e/TOKEN/REST`."""
        head, _, rest = path.partition("?")[0].removeprefix("/e/").partition("/")
        return (head, rest) if path.startswith("/e/") else ("", "")

    def _session(self) -> str:
        session = str(self.headers.get(SESSION_HEADER, ""))
        if len(session) > LONGEST_SESSION:
            raise bad_request(f"{SESSION_HEADER} has more than {LONGEST_SESSION} characters")
        return session

    def _send_signs_of_life(self, answer: WireAnswer, sampling: Future[Exchange]) -> None:
        """Begin the stream of an answer that takes long, so that its client does not give up."""
        while not wait([sampling], self.server.stream_wait_s).done:
            with contextlib.suppress(OSError):  # the lost connection ends the sampling
                self._send_chunks([answer.waiting()])

    def _awaited(self, asking: Coroutine[Any, Any, R]) -> R:
        return self._result(asyncio.run_coroutine_threadsafe(asking, self.server.loop))

    def _result(self, future: Future[R]) -> R:
        """Return what the episode answers; raise its errors as those of HTTP.

        Waits for the last token; a lost connection is a ConnectionError.
        """
        try:
            return future.result()
        except CancelledError:
            raise ConnectionAbortedError from None
        except UnusableMessages as error:
            raise bad_request(str(error)) from None
        except NoRoomForAnswer as error:
            raise bad_request(str(error), None, "context_length_exceeded") from None
        except TooManyTurns as error:
            raise bad_request(str(error), None, "too_many_turns") from None
        except EpisodeEnded:
            raise _ended() from None
        except Exception as error:  # noqa: BLE001  supervision boundary: the run has it as a failure
            text = f"the answer could not be sampled ({type(error).__name__})"
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text) from None

    def _send_chunks(self, events: Iterable[bytes], last: bool = False) -> None:
        """Send events of a stream, each as a chunk of its own; the first ones begin it."""
        if not self._streaming:
            self._streaming = True
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        for event in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        if last:
            self.wfile.write(b"0\r\n\r\n")
            self._streaming = False
        self.wfile.flush()


async def _while_connected(
    connection: socket.socket, answering: Coroutine[Any, Any, Exchange]
) -> Exchange:
    """Return the answers; cancelled when the client closes its connection before."""
    loop, asking = asyncio.get_running_loop(), asyncio.current_task()
    assert asking is not None, "run as a task"

    def readable() -> None:
        loop.remove_reader(connection)
        if _closed(connection):
            asking.cancel()

    loop.add_reader(connection, readable)
    try:
        return await answering
    finally:
        loop.remove_reader(connection)


def _closed(connection: socket.socket) -> bool:
    """Whether a readable connection was closed at its other end."""
    with contextlib.suppress(BlockingIOError):
        try:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionError:
            return True
    return False


def _ended() -> Refusal:
    return Refusal(HTTPStatus.GONE, "the episode has ended", "episode_ended")


def _models(model: str, max_context: int) -> dict[str, Any]:
    served = {"id": model, "object": "model", "created": 0, "owned_by": "composer-mesh"}
    return {"object": "list", "data": [{**served, "max_model_len": max_context}]}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


There = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
"""Runs a coroutine on the worker's event loop."""


class CapturedAgent:
    """An agent's endpoint in one episode, opened by `async with` on a workflow's event loop."""

    def __init__(
        self, endpoint: AgentEndpoint, sample: Sample, there: There, log: AnswerLog | None = None
    ) -> None:
        """The endpoint is started when an agent first needs it. Answers are recorded in a `log`."""
        self._endpoint, self._sample, self._there, self._log = endpoint, sample, there, log
        self._cleanup = AsyncExitStack()
        self._opened: AgentEpisode | None = None
        self.base_url = self.api_key = ""

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that clients of OpenAI and of Anthropic read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def trajectories(
        self,
        reward: float,
        *,
        success: bool | None = None,
        role: str = "",
        rewards: Mapping[str, float] | None = None,
        session: str | None = None,
        screened: bool = False,
    ) -> list[Trajectory]:
        """Return every path of the agent's requests, the longest first, with one reward for all.

        With `session`, only those of requests with that header X-Session-ID, of which there may be
        none. With `screened` nothing of them is trained.
        """
        captured = [one for one in self._unfailed().trajectories(session) if one.turns]
        if not captured and session is None:
            raise UnusableTask(
                "the agent has requested nothing from its endpoint: give it base_url"
            )
        won = reward >= 1 if success is None else success
        captured.sort(key=lambda one: -sum(len(turn.action_ids) for turn in one.turns))
        return [
            Trajectory(
                _turns(one),
                one.messages,
                reward,
                won,
                role,
                rewards=dict(rewards or {}),
                screened=screened,
            )
            for one in captured
        ]

    @property
    def answers(self) -> int:
        """How many answers the agent has received; raises an error that no retry has mended."""
        return sum(sum(one.trained) for one in self._unfailed().trajectories())

    @property
    def tokens(self) -> Counter[str]:
        """Tokens of the answers to the agent, received or not, as `tokens_of` counts them."""
        return Counter() if self._opened is None else self._opened.tokens

    def _unfailed(self) -> AgentEpisode:
        if self._opened is None:
            raise RuntimeError("the agent was not opened: use it in `async with`")
        if failures := self._opened.failures():
            raise failures[0]
        return self._opened

    async def __aenter__(self) -> Self:
        self._opened = await self._there(self._open())
        self.base_url, self.api_key = self._opened.base_url, self._opened.api_key
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._there(self._cleanup.aclose())

    async def _open(self) -> AgentEpisode:
        endpoint = await self._endpoint.start()
        opening = endpoint.episode(self._sample, self._sample.sampling, self._log)
        return await self._cleanup.enter_async_context(opening)


def _turns(one: CapturedTrajectory) -> list[Any]:
    return [
        replace(turn, trained=trained) for turn, trained in zip(one.turns, one.trained, strict=True)
    ]
