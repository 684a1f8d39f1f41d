"""The WebSocket protocol of uvicorn with our bounds, without what only its handshake needs.

A session is open for long and mostly waits, so what it holds is what bounds the number of sessions.
The parser of the handshake and the headers of the request are a sixth of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from composer_mesh.services.web.connections import EndsStalled


class _Ended:
    """The handshake of a connection that is open: nothing comes from it any more."""

    def events(self) -> Iterator[Any]:
        return iter(())


_ENDED: Any = _Ended()


class OpenSocket(EndsStalled, WSProtocol):
    """Releases the handshake when a connection has been accepted."""

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept" and self.handshake_complete:
            self.conn.handshake = _ENDED
            self.scope["headers"] = []
