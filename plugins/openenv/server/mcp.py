"""The tools of a session by MCP: the JSON-RPC requests that a client with tools alone needs.

initialize   begins no episode by itself; the transport does, and its opening is `instructions`
tools/list   the task's tools, and `answer`, because MCP has no other way to say a text
tools/call   a step; done, reward and metadata are in the result's `_meta`

Over streamable HTTP at `/mcp` there is one episode for each session of a client. `initialize`
begins the episode that the URL names, `/mcp?split=train&index=3`, and answers with a session id,
which names the server process that holds it. A request that another process receives is forwarded
there. Answers are JSON, not streams. A session ends by DELETE, or when it is idle.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from composer_mesh.configs.validation import validated
from composer_mesh.mesh.waiting import BackgroundTasks, reported_to_loop
from composer_mesh.plugins.openenv.server.observations import listed_tools
from composer_mesh.plugins.openenv.server.session import EnvSession, SessionPool
from composer_mesh.plugins.openenv.server.validation import SessionRequestRefused, json_object

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol with a handshake, the newest first."""
SERVER = {"name": "composer-mesh", "version": "1"}
INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SESSION_FAILED = -32600, -32601, -32602, -32000
META = "openenv"
"""Prefix of the keys in `_meta`."""


class RpcRequest(BaseModel):
    """A JSON-RPC request; one without an id is a notification."""

    model_config = ConfigDict(extra="ignore", strict=True)

    jsonrpc: str = Field(pattern=r"^2\.0$")
    method: str
    id: int | str | None = None
    params: dict[str, Any] | None = None


class CallParams(BaseModel):
    """Which tool is called, and with what."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: dict[str, Any] | None = None


def read_request(value: Mapping[str, Any]) -> RpcRequest | None:
    """Return a request; None for what is none."""
    try:
        return validated(RpcRequest, value)
    except ValidationError:
        return None


async def mcp_reply(request: RpcRequest | None, session: EnvSession) -> dict[str, Any] | None:
    """Return the reply to a request in a session; None for a notification."""
    if request is None:
        return no_request()
    if request.id is None:
        return None
    match request.method:
        case "ping":
            return rpc_result(request.id, {})
        case "tools/list":
            return rpc_result(request.id, {"tools": tools_of(session.tools)})
        case "tools/call":
            return await _called(request, session)
    return rpc_error(request.id, METHOD_NOT_FOUND, f"Method not found: {request.method[:80]}")


def no_request() -> dict[str, Any]:
    """Return the reply to what is no request."""
    return rpc_error(None, INVALID_REQUEST, "this is not a request of JSON-RPC 2.0")


def handshake(request: RpcRequest, opening: str) -> dict[str, Any]:
    """Return the reply to `initialize`, in the client's version where it is known."""
    requested = (request.params or {}).get("protocolVersion")
    result = {
        "protocolVersion": requested if requested in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": SERVER,
        "instructions": opening,
    }
    return rpc_result(request.id, result)


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in MCP's format."""
    return [
        {"name": one["name"], "description": one["description"], "inputSchema": one["input_schema"]}
        for one in tools
    ]


def rpc_result(request_id: int | str | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply with a result."""
    return {"jsonrpc": "2.0", "id": request_id, "result": dict(result)}


def rpc_error(
    request_id: int | str | None, code: int, text: str, data: Any = None
) -> dict[str, Any]:
    """Return a reply with an error."""
    error: dict[str, Any] = {"code": code, "message": text}
    if data is not None:
        error["data"] = data
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


async def _called(request: RpcRequest, session: EnvSession) -> dict[str, Any]:
    try:
        params = validated(CallParams, request.params or {})
    except ValidationError:
        return rpc_error(request.id, INVALID_PARAMS, "params need a name and an object arguments")
    action = {"type": "call_tool", "tool_name": params.name, "arguments": params.arguments or {}}
    try:
        return rpc_result(request.id, _result(await session.step(action)))
    except SessionRequestRefused as refused:
        return rpc_error(request.id, SESSION_FAILED, refused.text, refused.data)


def _result(seen: Mapping[str, Any]) -> dict[str, Any]:
    observation = seen["observation"]
    called = observation.get("result") or {}
    text = observation["text"] or (f"The episode has ended. Reward: {json.dumps(seen['reward'])}")
    return {
        "content": [{"type": "text", "text": text}],
        "isError": bool(called.get("is_error", False)),
        "_meta": {f"{META}/{key}": seen[key] for key in ("done", "reward", "metadata")},
    }


SESSION_HEADER = "mcp-session-id"
INTEGERS = ("index", "seed")


@dataclass
class _Open:
    session: EnvSession
    expires: asyncio.TimerHandle
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class McpAnswer:
    """An answer: its status, its JSON if it has any, and the id of a session that has begun."""

    status: int
    body: dict[str, Any] | None = None
    session_id: str = ""


class McpSessions:
    """The MCP sessions of one server process, `number`."""

    def __init__(self, pool: SessionPool, number: int) -> None:
        self._pool, self._number = pool, number
        self._open: dict[str, _Open] = {}
        self._closing = BackgroundTasks(reported_to_loop)

    def owner(self, session_id: str) -> int | None:
        """Return the process that a session id names; None if it is no id."""
        number = session_id.partition("-")[0]
        return int(number) if number.isdecimal() and len(number) < 5 else None

    async def post(
        self, body: bytes, session_id: str | None, query: Mapping[str, str]
    ) -> McpAnswer:
        """Answer a message. Waits for the task."""
        try:
            request = read_request(json_object(body))
        except SessionRequestRefused as refused:
            return McpAnswer(200, rpc_error(None, INVALID_REQUEST, refused.text))
        if request is None:
            return McpAnswer(200, no_request())
        if session_id is not None:
            return await self._in_session(request, session_id)
        if request.id is None:
            return McpAnswer(202)
        return await self._without_session(request, query)

    async def delete(self, session_id: str) -> bool:
        """End a session; return whether it was open. Waits for the task's own code."""
        found = self._open.pop(session_id, None)
        if found is None:
            return False
        found.expires.cancel()
        async with found.lock:
            await self._pool.close(found.session)
        return True

    async def close(self) -> None:
        """End all sessions."""
        for session_id in list(self._open):
            await self.delete(session_id)
        await self._closing.wait()

    async def _in_session(self, request: RpcRequest, session_id: str) -> McpAnswer:
        found = self._open.get(session_id)
        if found is None:
            return _ended(request)
        async with found.lock:
            if self._open.get(session_id) is not found:
                return _ended(request)  # by another request, while this one has waited
            found.expires.cancel()  # who waits for an answer is not idle
            try:
                reply = await mcp_reply(request, found.session)
            finally:
                if session_id in self._open:
                    found.expires = self._expiry(session_id)
        return McpAnswer(202) if reply is None else McpAnswer(200, reply)

    async def _without_session(self, request: RpcRequest, query: Mapping[str, str]) -> McpAnswer:
        match request.method:
            case "initialize":
                return await self._initialize(request, query)
            case "ping":
                return McpAnswer(200, rpc_result(request.id, {}))
            case "tools/list":
                tools = tools_of(listed_tools(self._pool.task))
                return McpAnswer(200, rpc_result(request.id, {"tools": tools}))
            case "tools/call":
                text = f"initialize first, and send the header {SESSION_HEADER}"
                return McpAnswer(200, rpc_error(request.id, INVALID_REQUEST, text))
        text = f"Method not found: {request.method[:80]}"
        return McpAnswer(200, rpc_error(request.id, METHOD_NOT_FOUND, text))

    async def _initialize(self, request: RpcRequest, query: Mapping[str, str]) -> McpAnswer:
        try:
            session = self._pool.open()
        except SessionRequestRefused as full:
            return McpAnswer(503, rpc_error(request.id, SESSION_FAILED, full.text, full.data))
        try:
            seen = await session.reset(_arguments(query))
        except BaseException as error:
            await asyncio.shield(self._pool.close(session))
            if isinstance(error, SessionRequestRefused):
                failed = rpc_error(request.id, SESSION_FAILED, error.text, error.data)
                return McpAnswer(200, failed)
            raise
        session_id = f"{self._number}-{secrets.token_urlsafe(24)}"
        self._open[session_id] = _Open(session, self._expiry(session_id))
        return McpAnswer(200, handshake(request, seen["observation"]["text"]), session_id)

    def _expiry(self, session_id: str) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self._pool.timeout_s, self._expire, session_id)

    def _expire(self, session_id: str) -> None:
        self._closing.start(f"closing {session_id[:8]}", self.delete(session_id))


def _ended(request: RpcRequest) -> McpAnswer:
    text = "the session has ended: initialize a new one"
    return McpAnswer(404, rpc_error(request.id, INVALID_REQUEST, text))


def _arguments(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the reset arguments in a URL, whose numbers are texts."""
    found: dict[str, Any] = dict(query)
    for name in INTEGERS:
        if (text := query.get(name)) is not None and text.isdecimal() and len(text) <= 16:
            found[name] = int(text)
    return found


DEADLINE_S = 600.0
KEPT = ("authorization", "content-type", "host", "mcp-session-id", "mcp-protocol-version", "origin")
"""Headers that are forwarded."""


class Forwarding:
    """The sockets of a server's processes, by number, in a folder that only its user can open."""

    def __init__(
        self, folder: Path, processes: int, number: int, deadline_s: float = DEADLINE_S
    ) -> None:
        self._folder, self._processes, self._number = folder, processes, number
        self._deadline_s = deadline_s
        self._clients: dict[int, httpx.AsyncClient] = {}

    def path(self, number: int) -> Path:
        """Return where a process listens for the others."""
        return self._folder / f"{number}.sock"

    def is_elsewhere(self, number: int) -> bool:
        """Whether a session of this process number is in another process."""
        return number != self._number and number < self._processes

    async def forward(self, number: int, request: Request, body: bytes) -> Response:
        """Return the answer of another process.

        Raises 404 where that is gone, with its sessions, and 504 where it does not answer.
        """
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        try:
            reply = await self._client(number).request(
                request.method, request.url.path, content=body, headers=headers
            )
        except httpx.TimeoutException:
            late = f"the process of that session has not answered for {self._deadline_s:g} s"
            raise HTTPException(504, late) from None
        except httpx.TransportError:
            raise HTTPException(404, "the process of that session is gone") from None
        kind = reply.headers.get("content-type")
        return Response(reply.content, reply.status_code, media_type=kind)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()

    def _client(self, number: int) -> httpx.AsyncClient:
        if number not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self.path(number)))
            self._clients[number] = httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=self._deadline_s
            )
        return self._clients[number]
