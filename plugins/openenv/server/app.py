"""The routes of an environment server, for Starlette.

WS   /ws                                    a session: reset, step, state, close
POST /reset /step                           an episode for one request
GET  /state /schema /metadata /health /openapi.json
POST /mcp, DELETE /mcp                      tools by MCP, with a session
GET  /rewards, POST /rewards                rewards that come after the end
GET  /list_environments, /{env}/splits      the Task API
POST /{env}/tasks num_tasks task task_range

The protocol of `/ws` is one frame in, one frame out, until the session ends:

    reset, step, state, mcp -> observation, state, mcp, or error with a code
    close                   -> the socket is closed

A client that sends faster than it is answered waits in its own socket: the next frame is read when
the last one has been answered.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from composer_mesh.plugins.openenv.client.wire import (
    SESSION_PATH,
    CloseFrame,
    ErrorCode,
    McpFrame,
    ResetFrame,
    StateFrame,
    StepFrame,
)
from composer_mesh.plugins.openenv.server.describe import (
    SPLITS,
    NoSuchTask,
    RangeQuery,
    SplitQuery,
    TaskQuery,
    UnnumberedEpisodes,
    metadata,
    num_tasks,
    one_task,
    openapi,
    schemas,
    task_range,
)
from composer_mesh.plugins.openenv.server.late_rewards import EpisodeReward, RewardFile
from composer_mesh.plugins.openenv.server.mcp import (
    SESSION_HEADER,
    Forwarding,
    McpSessions,
    mcp_reply,
    read_request,
)
from composer_mesh.plugins.openenv.server.session import EnvSession, SessionPool
from composer_mesh.plugins.openenv.server.validation import (
    MOST_REQUEST_BYTES,
    SessionRequestRefused,
    checked,
    client_frame,
    invalid,
    json_object,
)
from composer_mesh.services.web.bodies import HANDLERS, Bodies
from composer_mesh.tasks.errors import TaskError
from composer_mesh.tasks.task_loop import LoopLost

Model = TypeVar("Model", bound=BaseModel)
Read = TypeVar("Read")
STATUS = {
    ErrorCode.CAPACITY_REACHED: 503,
    ErrorCode.EXECUTION_ERROR: 500,
    ErrorCode.SESSION_ERROR: 500,
}
"""HTTP statuses of error codes; the others are the client's fault."""

LONGEST_NUMBER = 18
MOST_OF_ONE, MOST_OF_ALL = 128 * 2**20, 256 * 2**20
"""Bytes of unfinished requests and messages from one address, and from all."""


@dataclass(frozen=True)
class ServedEnvironments:
    """What the routes of one server process answer from."""

    pool: SessionPool
    mcp: McpSessions
    rewards: RewardFile
    forwarding: Forwarding
    bodies: Bodies = field(
        default_factory=lambda: Bodies(MOST_REQUEST_BYTES, MOST_OF_ONE, MOST_OF_ALL)
    )
    """Of requests; messages of sessions count too."""


class AcceptedSocket:
    """An accepted WebSocket."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_open = True

    async def receive(self) -> str | None:
        """Return the next text; None if the client has left. Raises Refused for other frames."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._is_open = False
            return None
        if message.get("text") is None:
            raise SessionRequestRefused(ErrorCode.INVALID_JSON, "this is a binary frame: send text")
        return str(message["text"])

    async def send(self, text: str) -> None:
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError:
            self._is_open = False
            raise

    async def close(self) -> None:
        if self._is_open:
            with contextlib.suppress(OSError):  # its client has left meanwhile
                await self._send({"type": "websocket.close", "code": 1000, "reason": ""})


async def serve_socket(socket: AcceptedSocket, pool: SessionPool) -> None:
    """Serve one client until it leaves, closes, is idle too long, or its session is lost."""
    try:
        async with pool.session() as session:
            while await _served(socket, session, pool.timeout_s):
                pass
    except SessionRequestRefused as refused:  # there is no place for a session
        await _send(socket, _error(refused), pool.timeout_s)
    await socket.close()


async def _served(socket: AcceptedSocket, session: EnvSession, timeout_s: float) -> bool:
    """Answer one frame; return whether the session continues."""
    try:
        async with asyncio.timeout(timeout_s):
            text = await socket.receive()
        if text is None:
            return False
        answer, continues = await _answered(text, session)
    except TimeoutError:
        reason = f"the session was idle for {timeout_s:g} s and is closed"
        answer, continues = (
            _error(SessionRequestRefused(ErrorCode.SESSION_ERROR, reason, True)),
            False,
        )
    except SessionRequestRefused as refused:
        answer, continues = _error(refused), not refused.ends
    return answer is not None and await _send(socket, answer, timeout_s) and continues


async def _answered(text: str, session: EnvSession) -> tuple[dict[str, Any] | None, bool]:
    frame = client_frame(text)
    match frame:
        case ResetFrame():
            return {"type": "observation", "data": await session.reset(frame.data)}, True
        case StepFrame():
            return {"type": "observation", "data": await session.step(frame.data)}, True
        case StateFrame():
            turn = None if frame.data is None else frame.data.turn
            return {"type": "state", "data": session.state(turn)}, True
        case McpFrame():
            return {
                "type": "mcp",
                "data": await mcp_reply(read_request(frame.data), session) or {},
            }, True
        case CloseFrame():
            return None, False


async def _send(socket: AcceptedSocket, frame: dict[str, Any], timeout_s: float) -> bool:
    """Send a frame; return whether the client has taken it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await socket.send(json_text(frame))
    except (TimeoutError, OSError):
        return False
    return True


def json_text(value: Any) -> str:
    """Return the JSON of an answer; values that JSON cannot carry are an error of the task."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        refused = SessionRequestRefused(
            ErrorCode.EXECUTION_ERROR, f"the task's messages cannot be sent as JSON: {error}"
        )
        return json.dumps(_error(refused))


def _error(refused: SessionRequestRefused) -> dict[str, Any]:
    return {"type": "error", "data": refused.data}


def always(value: Any) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler whose answer is always the same."""

    async def answer(_: Request) -> Response:
        return _json(value)

    return answer


class _Routes:
    def __init__(self, served: ServedEnvironments) -> None:
        self._served, self._pool = served, served.pool

    async def reset(self, request: Request) -> Response:
        data = await self._read(request, lambda body: json_object(body or b"{}"))
        return await self._stateless(lambda session: session.reset(data))

    async def step(self, request: Request) -> Response:
        action = (await self._read(request, json_object)).get("action")
        if not isinstance(action, dict):
            raise invalid("send an object with an object action")

        async def stepped(session: EnvSession) -> dict[str, Any]:
            await session.reset({})
            return await session.step(action)

        return await self._stateless(stepped)

    async def splits(self, request: Request) -> Response:
        self._check_name(request)
        return _json(list(SPLITS))

    async def num_tasks(self, request: Request) -> Response:
        query = await self._query(request, SplitQuery)
        count = await _counted(num_tasks(self._pool.runner, query.split))
        return _json({"num_tasks": count})

    async def tasks(self, request: Request) -> Response:
        query = await self._query(request, RangeQuery)
        found = await _counted(task_range(self._pool.runner, query))
        return _json({"tasks": found, "env_name": self._pool.task.name})

    async def task(self, request: Request) -> Response:
        query = await self._query(request, TaskQuery)
        return _json({"task": await _counted(one_task(self._pool.runner, query))})

    async def task_range(self, request: Request) -> Response:
        query = await self._query(request, RangeQuery)
        return _json({"tasks": await _counted(task_range(self._pool.runner, query))})

    async def mcp(self, request: Request) -> Response:
        body = await self._read(request, bytes)
        session_id = request.headers.get(SESSION_HEADER)
        if session_id is not None:
            owner = self._served.mcp.owner(session_id)
            if owner is None:
                return Response(status_code=404)
            if self._served.forwarding.is_elsewhere(owner):
                return await self._served.forwarding.forward(owner, request, body)
        if request.method == "DELETE":
            ended = session_id is not None and await self._served.mcp.delete(session_id)
            return Response(status_code=204 if ended else 404)
        answer = await self._served.mcp.post(body, session_id, request.query_params)
        headers = {SESSION_HEADER: answer.session_id} if answer.session_id else None
        if answer.body is None:
            return Response(status_code=answer.status)
        return _json(answer.body, answer.status, headers)

    async def post_reward(self, request: Request) -> Response:
        late = checked(EpisodeReward, await self._read(request, json_object))
        await asyncio.to_thread(self._served.rewards.post, late)
        return _json({"episode_id": late.episode_id, "reward": late.reward})

    async def get_reward(self, request: Request) -> Response:
        if "after" in request.query_params:
            number = _number(request)
            return _json(await asyncio.to_thread(self._served.rewards.after, number))
        episode_id = request.query_params.get("episode_id", "")
        found = await self._served.rewards.get(episode_id, _seconds(request))
        return _json(found or {"episode_id": episode_id, "reward": None})

    async def _stateless(self, work: Callable[[EnvSession], Awaitable[dict[str, Any]]]) -> Response:
        async with self._pool.session() as session:
            return _json(await work(session))

    async def _query(self, request: Request, kind: type[Model]) -> Model:
        self._check_name(request)
        return checked(kind, await self._read(request, json_object))

    async def _read(self, request: Request, make: Callable[[bytes], Read]) -> Read:
        address = request.client.host if request.client is not None else ""
        return await self._served.bodies.read(request, address, make)

    def _check_name(self, request: Request) -> None:
        name = request.path_params["env"]
        if name.lower() != self._pool.task.name.lower():
            raise HTTPException(404, f"unknown environment {name[:40]!r}")


def make_app(served: ServedEnvironments) -> ASGIApp:
    """Return the application of one server process.

    Sockets pass none of Starlette's layers, whose frames are a third of what a session takes.
    """
    http = _http_app(served)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _socket(scope, receive, send, served.pool)
        else:
            await http(scope, receive, send)

    return app


async def _socket(scope: Scope, receive: Receive, send: Send, pool: SessionPool) -> None:
    await receive()  # that it connects
    if scope["path"] != SESSION_PATH:
        await send({"type": "websocket.close", "code": 1008, "reason": "sessions are at /ws"})
        return
    try:
        await send({"type": "websocket.accept"})
    except OSError:
        return  # its client has left
    await serve_socket(AcceptedSocket(receive, send), pool)


def _http_app(served: ServedEnvironments) -> Starlette:
    do, task = _Routes(served), served.pool.task
    routes = [
        Route("/reset", do.reset, methods=["POST"]),
        Route("/step", do.step, methods=["POST"]),
        Route("/state", always({"episode_id": None, "step_count": 0})),
        Route("/schema", always(schemas(task))),
        Route("/metadata", always(metadata(task))),
        Route("/health", always({"status": "healthy"})),
        Route("/openapi.json", always(openapi(task))),
        Route("/mcp", do.mcp, methods=["POST", "DELETE"]),
        Route("/rewards", do.post_reward, methods=["POST"]),
        Route("/rewards", do.get_reward),
        Route("/list_environments", always([task.name])),
        Route("/{env}/splits", do.splits),
        Route("/{env}/num_tasks", do.num_tasks, methods=["POST"]),
        Route("/{env}/tasks", do.tasks, methods=["POST"]),
        Route("/{env}/task", do.task, methods=["POST"]),
        Route("/{env}/task_range", do.task_range, methods=["POST"]),
    ]
    return Starlette(
        routes=routes, exception_handlers={**HANDLERS, SessionRequestRefused: _refused}
    )


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, SessionRequestRefused)
    return _json({"detail": error.data}, STATUS.get(error.code, 400))


async def _counted(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except UnnumberedEpisodes:
        raise HTTPException(501, "the episodes are generated: any index can be reset") from None
    except NoSuchTask as error:
        raise HTTPException(400, str(error)) from None
    except (TaskError, LoopLost) as error:
        raise SessionRequestRefused(
            ErrorCode.EXECUTION_ERROR, f"the rows failed: {type(error).__name__}"
        ) from None


def _seconds(request: Request) -> float:
    try:
        wait_s = float(request.query_params.get("wait_s", "0"))
    except ValueError:
        wait_s = -1.0
    if not wait_s >= 0:
        raise invalid("wait_s must be a number of seconds from 0")
    return wait_s


def _number(request: Request) -> int:
    """Return the number after which rewards are requested."""
    text = request.query_params["after"]
    if not text.isascii() or not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise invalid("after must be the number of a reward, or 0 for all")
    return int(text)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_text(value), status, headers, media_type="application/json")
