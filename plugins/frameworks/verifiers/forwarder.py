"""Forwards model requests to the endpoint of their episode. Runs in the environment of verifiers.

    verifiers -- /v1/…, /inference/v1/generate --> Forwarder --> endpoint of an episode

Which episode it is says the header X-Session-ID.

One base URL and one key for all episodes: verifiers keeps its clients by them until it ends.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from typing import Any, ClassVar, Self

import aiohttp
from aiohttp import web

SESSION_HEADER = "X-Session-ID"
PASSED_ON = ("Content-Type", SESSION_HEADER, "x-stainless-retry-count")
LARGEST_REQUEST = 8 * 2**20
BODY_S = 60.0
"""Seconds in which a body has to arrive."""


class Forwarder:
    """Serves on 127.0.0.1 within its `async with`."""

    KEY_VARIABLE: ClassVar[str] = "COMPOSER_MESH_FORWARDER_API_KEY"
    """Environment variable of this process; verifiers hands no name with API_KEY to programs."""

    def __init__(self, body_s: float = BODY_S) -> None:
        self._body_s = body_s
        self.key = secrets.token_urlsafe(32)
        self._targets: dict[str, tuple[str, str]] = {}
        self.base_url = ""

    def open(self, session: str, base_url: str, api_key: str) -> None:
        """Send requests of a session to an endpoint."""
        self._targets[session] = base_url.removesuffix("/v1"), api_key

    def close(self, session: str) -> None:
        """Refuse requests of a session from now on."""
        del self._targets[session]

    async def __aenter__(self) -> Self:
        os.environ[self.KEY_VARIABLE] = self.key
        endless = aiohttp.ClientTimeout(total=None, sock_connect=30)
        unlimited = aiohttp.TCPConnector(limit=0)
        self._client = aiohttp.ClientSession(timeout=endless, connector=unlimited)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_route("*", "/{rest:.*}", self._forward)
        # Cancelled with its client's connection, so that the generation is too.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            return _refusal(401, "send the key of the forwarder")
        target = self._target(request)
        if target is None:
            return _refusal(404, f"no episode has this {SESSION_HEADER}")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["Authorization"] = f"Bearer {target[1]}"
        try:
            async with asyncio.timeout(self._body_s):
                body = await request.read()
        except TimeoutError:
            return _refusal(408, f"the body did not arrive in {self._body_s:g} s: send it faster")
        url = target[0] + request.path
        try:
            async with self._client.request(request.method, url, data=body, headers=headers) as one:
                return await _passed_on(request, one)
        except aiohttp.ClientError as error:
            return _refusal(502, f"the endpoint of the episode failed: {error}")

    def _target(self, request: web.Request) -> tuple[str, str] | None:
        """Return where a request goes; what is no model request is the same at all endpoints."""
        if request.method == "GET":
            return next(iter(self._targets.values()), None)
        return self._targets.get(request.headers.get(SESSION_HEADER, ""))


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
    passed = web.StreamResponse(status=answer.status, headers=headers)
    await passed.prepare(request)
    async for piece in answer.content.iter_any():
        await passed.write(piece)
    await passed.write_eof()
    return passed


def _refusal(status: int, text: str) -> web.Response:
    error: dict[str, Any] = {"message": text, "type": "invalid_request_error"}
    return web.json_response({"error": error}, status=status)
