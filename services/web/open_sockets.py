"""The WebSocket protocol of uvicorn with our bounds, without what only its handshake needs.

A session is open for long and mostly waits, so what it holds is what bounds the number of sessions.
The parser of the handshake and the headers of the request are a sixth of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from composer_mesh.mesh.json_server import BudgetSpent
from composer_mesh.services.web.connections import EndsStalled

TRY_AGAIN_LATER, LONGEST_REASON = 1013, 120
"""Of RFC 6455: a status, and the bytes of a reason."""


class _Ended:
    """The handshake of a connection that is open: nothing comes from it any more."""

    def events(self) -> Iterator[Any]:
        return iter(())


_ENDED: Any = _Ended()


class OpenSocket(EndsStalled, WSProtocol):
    """Releases the handshake when a connection has been accepted.

    A message counts among those of its address until the application receives the next.
    """

    _held = _received = 0

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept" and self.handshake_complete:
            self.conn.handshake = _ENDED
            self.scope["headers"] = []

    async def receive(self) -> Any:
        self._hold(-min(self._received, self._held))
        message: Any = await super().receive()
        self._received = len(message.get("text") or message.get("bytes") or "")
        return message

    def handle_message(self, event: TextMessage | BytesMessage) -> None:
        try:
            self._hold(len(event.data))
        except BudgetSpent as spent:
            self._refuse(str(spent))
        else:
            super().handle_message(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hold(-self._held)

    def _hold(self, count: int) -> None:
        address = "" if self.client is None else self.client[0]
        self.config.messages.change(address, count)
        self._held += count

    def _refuse(self, reason: str) -> None:
        self.close_sent = True
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": reason}
        )
        closing = CloseConnection(code=TRY_AGAIN_LATER, reason=reason[:LONGEST_REASON])
        self.transport.write(self.conn.send(closing))
        self.transport.close()
