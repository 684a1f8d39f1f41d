"""The tools of a session by MCP: the JSON-RPC requests that a client with tools alone needs.

initialize   begins no episode by itself; the transport does, and its opening is `instructions`
tools/list   the task's tools, and `answer`, because MCP has no other way to say a text
tools/call   a step; done, reward and metadata are in the result's `_meta`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_mesh.configs.validation import validated
from composer_mesh.plugins.openenv.server.errors import Refused
from composer_mesh.plugins.openenv.server.session import EnvSession

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


async def mcp_reply(value: Mapping[str, Any], session: EnvSession) -> dict[str, Any] | None:
    """Return the reply to a request in a session; None for a notification."""
    request = read_request(value)
    if request is None:
        return rpc_error(None, INVALID_REQUEST, "this is no request of JSON-RPC 2.0")
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


def handshake(request: RpcRequest, opening: str) -> dict[str, Any]:
    """Return the reply to `initialize`, in the client's version where it is known."""
    asked = (request.params or {}).get("protocolVersion")
    result = {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
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
    except Refused as refused:
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
