"""Brings a request to the server process that holds its session, over a Unix socket."""

from __future__ import annotations

from pathlib import Path

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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
