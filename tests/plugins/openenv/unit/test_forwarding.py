"""Requests that are brought to the server process that holds their session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from composer_mesh.plugins.openenv.server.forwarding import Forwarding


def request() -> Request:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"cookie", b"not forwarded")],
    }
    return Request(scope)


async def test_an_answer_of_another_process_is_passed_on(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"body"))
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Type: a/b\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    forwarding = Forwarding(tmp_path, 2, 0)
    async with await asyncio.start_unix_server(answer, forwarding.path(1)):
        found = await forwarding.forward(1, request(), b"body")
        await forwarding.close()
    assert (found.status_code, found.media_type, found.body) == (201, "a/b", b"hi")
    assert b"cookie" not in heard[0]


async def test_a_process_that_is_gone_has_lost_its_sessions(tmp_path: Path) -> None:
    forwarding = Forwarding(tmp_path, 2, 0)
    with pytest.raises(HTTPException, match="gone") as error:
        await forwarding.forward(1, request(), b"")
    await forwarding.close()
    assert error.value.status_code == 404


async def test_a_process_that_does_not_answer_still_has_its_sessions(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the one who asked has gone
        asked.set()
        writer.close()

    forwarding = Forwarding(tmp_path, 2, 0, deadline_s=0.2)
    async with await asyncio.start_unix_server(stand_still, forwarding.path(1)):
        with pytest.raises(HTTPException, match=r"not answered for 0\.2 s") as error:
            await forwarding.forward(1, request(), b"")
        await forwarding.close()
        await asked.wait()
    assert error.value.status_code == 504
