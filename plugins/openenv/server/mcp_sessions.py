"""MCP over streamable HTTP at `/mcp`: one episode for each session of a client.

`initialize` begins the episode that the URL names, `/mcp?split=train&index=3`, and answers with a
session id, which names the server process that holds it. A request that another process receives
is forwarded there. Answers are JSON, not streams. A session ends by DELETE, or when it is idle.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.mesh.waiting import BackgroundTasks, told_to_loop
from composer_mesh.plugins.openenv.server.errors import Refused
from composer_mesh.plugins.openenv.server.mcp import (
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    SESSION_FAILED,
    RpcRequest,
    handshake,
    mcp_reply,
    read_request,
    rpc_error,
    rpc_result,
    tools_of,
)
from composer_mesh.plugins.openenv.server.session import EnvSession
from composer_mesh.plugins.openenv.server.session_pool import SessionPool
from composer_mesh.plugins.openenv.server.tools import listed_tools
from composer_mesh.plugins.openenv.server.validation import json_object

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
        self._closing = BackgroundTasks(told_to_loop)

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
        except Refused as refused:
            return McpAnswer(200, rpc_error(None, INVALID_REQUEST, refused.text))
        if request is None:
            text = "this is no request of JSON-RPC 2.0"
            return McpAnswer(200, rpc_error(None, INVALID_REQUEST, text))
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
                reply = await mcp_reply(request.model_dump(), found.session)
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
        except Refused as full:
            return McpAnswer(503, rpc_error(request.id, SESSION_FAILED, full.text, full.data))
        try:
            seen = await session.reset(_arguments(query))
        except BaseException as error:
            await asyncio.shield(self._pool.close(session))
            if isinstance(error, Refused):
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
        self._closing.start(f"closing {session_id[:8]}", self._ended(session_id))

    async def _ended(self, session_id: str) -> None:
        await self.delete(session_id)


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
