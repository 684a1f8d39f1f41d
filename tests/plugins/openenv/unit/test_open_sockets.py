"""What an open session holds of its connection."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from served_tasks import pool_of, served, served_beside
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from wsproto.handshake import H11Handshake

from composer_mesh.mesh.json_server import ByteBudget
from composer_mesh.plugins.openenv.server.app import make_app
from composer_mesh.services.web.connections import TRY_AGAIN_LATER, OpenSocket, ServerLimits
from composer_mesh.services.web.http_server import http_config, listening, listening_socket


def test_an_open_session_holds_no_parser_of_its_handshake_and_answers_on(
    tmp_path: Path, build_config: Any
) -> None:
    config = build_config(data={"task": "served_tasks:Count"})
    with served_beside(tmp_path, config) as url:
        address = f"ws{url.removeprefix('http')}/ws"
        with connect(address, proxy=None) as first, connect(address, proxy=None) as second:
            for socket in (first, second, first):
                socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                assert json.loads(socket.recv())["type"] == "observation"
            assert not [one for one in gc.get_objects() if type(one) is H11Handshake]


async def test_a_session_that_ends_frees_its_connection(tmp_path: Path) -> None:
    app = make_app(served(tmp_path, pool_of(tmp_path)))
    config = http_config(app, 0, ServerLimits(most=8), ByteBudget(2**20, 2**20), ws=OpenSocket)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(config, listener) as port:
            for _ in range(4 * 8):
                async with async_connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket:
                    await socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                    assert json.loads(await socket.recv())["type"] == "observation"


async def test_messages_of_all_sessions_have_a_bound_of_bytes_and_leave_nothing_held(
    tmp_path: Path,
) -> None:
    budget = ByteBudget(of_one=1000, of_all=1000)
    app = make_app(served(tmp_path, pool_of(tmp_path)))
    config = http_config(app, 0, ServerLimits(), budget, ws=OpenSocket)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(config, listener) as port:
            url = f"ws://127.0.0.1:{port}/ws"
            async with async_connect(url, proxy=None) as first:
                reset = json.dumps({"type": "reset", "data": {"seed": 1}}) + " " * 500
                for _ in range(4):
                    await first.send(reset)
                    assert json.loads(await first.recv())["type"] == "observation"
                async with async_connect(url, proxy=None) as second:
                    await second.send(["{", "a" * 2000])
                    with pytest.raises(ConnectionClosed, match="may hold 1,000 bytes") as closed:
                        await second.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == TRY_AGAIN_LATER
                await first.send(reset)
                assert json.loads(await first.recv())["type"] == "observation"
    assert budget.total == 0
