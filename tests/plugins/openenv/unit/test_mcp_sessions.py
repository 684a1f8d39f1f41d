"""When a session of MCP is idle, and when it has ended."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

from served_tasks import Count, Counting, pool_of

from composer_mesh.plugins.openenv.server.mcp_sessions import McpAnswer, McpSessions


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
