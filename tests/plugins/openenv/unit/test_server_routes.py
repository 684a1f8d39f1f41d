"""The HTTP routes: episodes of one request, the Task API, late rewards, and who may ask.

Also docs/serve-env.md: every option and route, and its Python runs.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from guides import Guide
from served_tasks import SECRET, CountRows, pool_of, served

from composer_mesh.plugins.openenv.server.app import make_app
from composer_mesh.plugins.openenv.server.describe import ROUTES
from composer_mesh.plugins.openenv.server.mcp import VERSIONS
from composer_mesh.plugins.openenv.server.validation import MOST_REQUEST_BYTES
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.web.http_server import Access

TOKEN = "a token of this test"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def client(folder: Path, token: str = "", rows: bool = False, **pool: Any) -> httpx.AsyncClient:
    task = CountRows.create() if rows else None
    app = make_app(served(folder, pool_of(folder, task, **pool)))
    transport = httpx.ASGITransport(Access(app, ("localhost", "127.0.0.1"), token))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


async def test_an_episode_of_one_request_keeps_no_place(tmp_path: Path) -> None:
    async with client(tmp_path, most=1) as http:
        for _ in range(3):
            begun = (await http.post("/reset", json={"seed": 2})).json()
            assert begun["observation"]["text"]
            step = await http.post("/step", json={"action": {"message": "done"}})
            assert step.json()["done"] is True
        assert (await http.post("/reset")).status_code == 200


async def test_no_answer_of_the_task_api_tells_a_row(tmp_path: Path) -> None:
    split = {"split": "train"}
    async with client(tmp_path, rows=True) as http:
        name = (await http.get("/list_environments")).json()[0]
        said = [(await http.get(f"/{name}/splits")).json()]
        for route, more in (
            ("num_tasks", {}),
            ("tasks", {}),
            ("task", {"index": 2}),
            ("task_range", {"start": 1, "stop": 9}),
        ):
            said.append((await http.post(f"/{name}/{route}", json={**split, **more})).json())
        beyond = await http.post(f"/{name}/task", json={**split, "index": 3})
    assert said[1] == {"num_tasks": 3}
    assert said[3] == {"task": {"split": "train", "index": 2}}
    assert [one["index"] for one in said[4]["tasks"]] == [1, 2]
    assert beyond.status_code == 400
    assert SECRET not in json.dumps(said)


async def test_generated_episodes_have_no_number_but_any_index(tmp_path: Path) -> None:
    split = {"split": "train"}
    async with client(tmp_path) as http:
        assert (await http.post("/count/num_tasks", json=split)).status_code == 501
        assert (await http.post("/count/tasks", json=split)).status_code == 501
        found = await http.post("/count/task_range", json={**split, "start": 7, "stop": 9})
        assert [one["index"] for one in found.json()["tasks"]] == [7, 8]
        many = {**split, "start": 0, "stop": 10**9}
        assert (await http.post("/count/task_range", json=many)).status_code == 400
        assert (await http.post("/other/num_tasks", json=split)).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"action": 3}', 400),
        (b'{"action": {"message": 3}}', 400),
        (b'{"action": {"type": "call_tool", "tool_name": "fail"}}', 500),
        (b" " * (MOST_REQUEST_BYTES + 1), 413),
    ],
)
async def test_a_bad_request_has_a_status_and_a_reason(
    tmp_path: Path, body: bytes, status: int
) -> None:
    async with client(tmp_path, most=1) as http:
        refused = await http.post("/step", content=body)
        assert refused.status_code == status
        assert refused.json()["detail"]
        assert (await http.post("/reset")).status_code == 200, "no place was kept"


async def test_a_full_server_says_so(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1)
    transport = httpx.ASGITransport(make_app(served(tmp_path, pool)))
    async with (
        pool.session(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        full = await http.post("/reset")
    assert full.status_code == 503
    assert full.json()["detail"]["code"] == "CAPACITY_REACHED"


async def test_a_reward_that_comes_late_is_waited_for_and_the_last_one_counts(
    tmp_path: Path,
) -> None:
    async with client(tmp_path) as http:
        asked = {"episode_id": "one"}
        assert (await http.get("/rewards", params=asked)).json()["reward"] is None
        for reward in (0.25, 0.75):
            late = {"episode_id": "one", "reward": reward, "source": "review"}
            assert (await http.post("/rewards", json=late)).status_code == 200
        found = (await http.get("/rewards", params={**asked, "wait_s": "60"})).json()
        assert (found["reward"], found["source"]) == (0.75, "review")
        for bad in ({"reward": True}, {"reward": "1"}, {"episode_id": ""}, {"more": 1}):
            body = {"episode_id": "two", "reward": 1.0, **bad}
            assert (await http.post("/rewards", json=body)).status_code == 400
        infinite = '{"episode_id": "two", "reward": Infinity}'
        assert (await http.post("/rewards", content=infinite)).status_code == 400
        assert (await http.get("/rewards", params={**asked, "wait_s": "nan"})).status_code == 400


async def test_without_the_token_nothing_but_the_health_is_told(tmp_path: Path) -> None:
    async with client(tmp_path, TOKEN) as http:
        assert (await http.get("/health")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN}):
            for route in ("/metadata", "/schema", "/rewards", "/openapi.json"):
                assert (await http.get(route, headers=headers)).status_code == 401
            assert (await http.post("/mcp", json={}, headers=headers)).status_code == 401
        assert (await http.get("/metadata", headers=AUTHORIZED)).status_code == 200


async def test_a_page_of_another_host_reaches_nothing(tmp_path: Path) -> None:
    async with client(tmp_path) as http:
        for headers in (
            {"Host": "evil.example"},
            {"Host": "evil.example:8000"},
            {"Host": "[::1"},
            {"Host": ""},
        ):
            assert (await http.post("/reset", headers=headers)).status_code == 421
        for origin in ("http://evil.example", "null", "http://localhost.evil.example"):
            assert (await http.post("/reset", headers={"Origin": origin})).status_code == 403
        own = {"Origin": "http://localhost:8000"}
        assert (await http.post("/reset", headers=own)).status_code == 200


async def test_a_client_that_has_left_is_no_error_of_the_server(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1)
    app = Access(make_app(served(tmp_path, pool)), ("localhost",), "")
    frames = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "{"}]

    async def receive() -> dict[str, Any]:
        return frames.pop(0)

    async def send(message: Any) -> None:
        if message["type"] != "websocket.accept":
            raise BrokenPipeError

    scope = {"type": "websocket", "path": "/ws", "headers": [(b"host", b"localhost")]}
    await app(scope, receive, send)
    pool.open()


async def test_a_websocket_of_another_host_is_closed_unaccepted(tmp_path: Path) -> None:
    app = Access(make_app(served(tmp_path, pool_of(tmp_path))), ("localhost",), "")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    for name, value in ((b"host", b"evil.example"), (b"origin", b"http://evil.example")):
        headers = [(name, value), (b"host", b"localhost")]
        await app({"type": "websocket", "path": "/ws", "headers": headers}, receive, send)
    assert [one["type"] for one in sent] == ["websocket.close"] * 2


PAGE = Guide.read("serve-env.md")


def test_the_page_names_every_option_and_no_other() -> None:
    (commands,) = (one for one in make_parser()._actions if one.dest == "command")
    known = {word for one in commands.choices["serve-env"]._actions for word in one.option_strings}
    table = "\n".join(line for line in PAGE.text.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"--[a-z][a-z-]*", table))
    assert named == {one for one in known if one.startswith("--")} - {"--help"}


def test_the_page_names_every_route_and_the_versions_of_mcp() -> None:
    table = PAGE.text[PAGE.text.index("| route |") : PAGE.text.index("`reset` takes")]
    for route in ROUTES:
        assert f"{route.rpartition('/')[2]}`" in table, route
    assert VERSIONS[0] in PAGE.text
    assert VERSIONS[-1] in PAGE.text


def test_the_python_of_the_page_runs() -> None:
    found: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["factory"].name == "MyTask"
