"""Sessions of MCP: when they are idle and end, and which server process their requests reach."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from served_tasks import Count, Counting, pool_of
from starlette.exceptions import HTTPException
from starlette.requests import Request

from composer_mesh.plugins.openenv.server.mcp import Forwarding, McpAnswer, McpSessions


class Hanging(Counting):
    """Its tool `hang` returns when the test says so."""

    never: ClassVar[threading.Event] = threading.Event()


class CountHanging(Count):
    """Count with a tool that hangs."""

    session_class = Hanging


async def asked(
    sessions: McpSessions, session_id: str | None, method: str, **params: Any
) -> McpAnswer:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return await sessions.post(json.dumps(body).encode(), session_id, {})


async def test_a_session_is_not_idle_during_a_call_and_ends_after_it_where_that_was_asked(
    tmp_path: Path,
) -> None:
    Hanging.never.clear()
    sessions = McpSessions(pool_of(tmp_path, CountHanging.create()), 0)
    begun = await asked(sessions, None, "initialize", protocolVersion="2025-06-18")
    name = begun.session_id
    calls = [
        asyncio.create_task(asked(sessions, name, "tools/call", name="hang", arguments={}))
        for _ in range(2)
    ]
    await asyncio.sleep(0)  # the first one waits for its tool, the second for the first
    assert sessions._open[name].expires.cancelled()
    deleted = asyncio.create_task(sessions.delete(name))
    await asyncio.sleep(0)
    Hanging.never.set()
    answers = [(await one).status for one in calls]
    assert (answers, await deleted, sessions._open) == ([200, 404], True, {})


async def test_a_session_is_idle_again_after_a_call(tmp_path: Path) -> None:
    sessions = McpSessions(pool_of(tmp_path), 0)
    name = (await asked(sessions, None, "initialize", protocolVersion="2025-06-18")).session_id
    await asked(sessions, name, "tools/call", name="add", arguments={"by": 1})
    assert not sessions._open[name].expires.cancelled()
    await sessions.close()


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
