"""Live pages: how many there may be, what one that was left frees, and processes that died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from composer_mesh.plugins.dashboard.live import LiveConnections, PageParts
from composer_mesh.plugins.dashboard.run_views import with_dead
from composer_mesh.services.web.http_server import http_config, listening, listening_socket


def process(name: str, state: str = "ready") -> dict[str, Any]:
    return {"name": name, "state": state, "doing": "", "restarts": 0}


def test_a_process_that_has_died_is_seen_though_another_one_has_its_place() -> None:
    hosts: list[dict[str, Any]] = [
        {"name": "here", "processes": [process("controller"), process("generator-1")]},
        {"name": "there", "processes": [process("generator-0.2")]},
    ]
    events: list[dict[str, Any]] = [
        {"event": "actor_died", "actor": "generator-1", "time": 101.0},
        {"event": "actor_died", "actor": "generator-0", "time": 95.0, "fields": {"host": "there"}},
        {"event": "actor_died", "actor": "trainer", "time": 89.0},
        {"event": "actor_died", "actor": "rollouts-0", "time": "broken"},
        {"event": "actor_restarted", "actor": "generator-0.2", "time": 96.0},
    ]
    shown = {
        host["name"]: [(one["name"], one["state"]) for one in host["processes"]]
        for host in with_dead(hosts, events, now=100.0)
    }
    assert shown == {
        "here": [("controller", "ready"), ("generator-1", "dead")],
        "there": [("generator-0.2", "ready"), ("generator-0", "dead")],
    }
    assert with_dead([], events, now=100.0) == []


ONE_FIGURE = PageParts(lambda: {"figures": 1}, lambda name: f"<p>{name}</p>")
"""A page of one part that never changes."""


@pytest.mark.parametrize("most", [1, 3])
async def test_a_page_that_is_left_frees_its_place(most: int) -> None:
    live = LiveConnections(most, look_s=0.02)

    def page(_: Request) -> Response:
        return live.response(ONE_FIGURE)

    def end() -> None:
        live.closing = True

    app = Starlette(routes=[Route("/live", page)])
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(http_config(app, 2), listener, before_end=end) as port:
            for _ in range(3):
                opened = [await opened_page(port) for _ in range(most)]
                assert b"503" in (refused := await answered(port))[0]
                assert f"{most} pages are open" in refused[1].decode()
                for writer in opened:
                    writer.close()


async def opened_page(port: int) -> asyncio.StreamWriter:
    """Open a page once there is a place, and wait for its first part; closing it leaves it."""
    async with asyncio.timeout(30):
        while True:
            reader, writer = await asked(port)
            if b"200" in await reader.readline():
                await reader.readuntil(b"<p>figures</p>")
                return writer
            writer.close()
            await asyncio.sleep(0.01)


async def answered(port: int) -> tuple[bytes, bytes]:
    """Return the first line of an answer that ends, and all of it."""
    async with asyncio.timeout(30):
        reader, writer = await asked(port)
        line = await reader.readline()
        rest = await reader.read()
        writer.close()
        return line, line + rest


async def asked(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    await writer.drain()
    return reader, writer
