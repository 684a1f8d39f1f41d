"""The protocol of `/ws`: one frame in, one frame out, until the session ends.

    reset, step, state, mcp -> observation, state, mcp, or error with a code
    close                   -> the socket is closed

A client that sends faster than it is answered waits in its own socket: the next frame is read when
the last one has been answered.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from composer_mesh.plugins.openenv.client.wire import (
    CloseFrame,
    ErrorCode,
    McpFrame,
    ResetFrame,
    StateFrame,
    StepFrame,
)
from composer_mesh.plugins.openenv.server.mcp import mcp_reply
from composer_mesh.plugins.openenv.server.session import EnvSession, SessionPool
from composer_mesh.plugins.openenv.server.validation import SessionRequestRefused, client_frame


class Socket(Protocol):
    """An accepted WebSocket."""

    async def receive(self) -> str | None:
        """Return the next text; None if the client has left. Raises Refused for other frames."""

    async def send(self, text: str) -> None:
        """Send a text; waits until the client has room for it."""

    async def close(self) -> None:
        """Close the socket."""


async def serve_socket(socket: Socket, pool: SessionPool) -> None:
    """Serve one client until it leaves, closes, is idle too long, or its session is lost."""
    try:
        async with pool.session() as session:
            while await _served(socket, session, pool.timeout_s):
                pass
    except SessionRequestRefused as refused:  # there is no place for a session
        await _send(socket, _error(refused), pool.timeout_s)
    await socket.close()


async def _served(socket: Socket, session: EnvSession, timeout_s: float) -> bool:
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
            return {"type": "mcp", "data": await mcp_reply(frame.data, session) or {}}, True
        case CloseFrame():
            return None, False


async def _send(socket: Socket, frame: dict[str, Any], timeout_s: float) -> bool:
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
