"""Who may see the page, and which requests change a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboards import BASE, client, dashboard

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard import commands
from composer_mesh.plugins.dashboard.access import local_path
from composer_mesh.plugins.dashboard.app import DashboardOptions, serving
from composer_mesh.plugins.openenv.server.command import ServeOptions
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.directory.control import Control
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.web.options import ListenOptions, ServeRefused

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def runs(tmp_path: Path, build_config: Callable[..., Config]) -> Path:
    with RunStore(tmp_path / "one", build_config()) as store:
        store.add_event("run_started")
    return tmp_path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:8200"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
    ],
)
async def test_a_name_that_is_not_the_servers_and_a_page_of_another_origin_are_refused(
    runs: Path, headers: dict[str, str], status: int
) -> None:
    """DNS rebinding: the page of another host, whose name now leads to this machine."""
    _, app = dashboard(runs)
    async with client(app, **headers) as browser:
        assert (await browser.get("/")).status_code == status


@pytest.mark.parametrize(("token", "status"), [("", 403), (TOKEN, 200)])
async def test_another_user_of_this_machine_needs_the_token(
    runs: Path, token: str, status: int
) -> None:
    _, app = dashboard(runs, token, user=os.geteuid() + 4321)
    async with client(app, authorization=f"Bearer {TOKEN}") as browser:
        answer = await browser.get("/runs/one/")
        assert answer.status_code == status
        assert ("Overview" in answer.text) == (status == 200)


async def test_nothing_but_the_form_and_the_style_is_seen_without_the_token(runs: Path) -> None:
    _, app = dashboard(runs, TOKEN)
    async with client(app) as browser:
        for path in ("/", "/runs/one/", "/runs/one/live", "/compare", "/nothing"):
            answer = await browser.get(path)
            assert answer.status_code == 401
            assert "Overview" not in answer.text
        assert (await browser.get("/static/style.css")).status_code == 200
        assert (await browser.get("/?token=wrong")).status_code == 401


async def test_the_link_with_the_token_gives_a_cookie_and_leaves_the_address(runs: Path) -> None:
    _, app = dashboard(runs, TOKEN)
    async with client(app) as browser:
        answer = await browser.get(f"/runs/one/?x=time&token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs/one/?x=time")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert (await browser.get("/runs/one/")).status_code == 200


async def test_the_form_and_a_bearer_bring_the_token_too(runs: Path) -> None:
    _, app = dashboard(runs, TOKEN)
    async with client(app) as browser:
        given = {"token": "wrong", "where": "/"}
        assert (await browser.post("/login", data=given)).status_code == 401
        given = {"token": TOKEN, "where": "//evil.example"}
        answer = await browser.post("/login", data=given)
        assert answer.headers["location"] == "/"
        assert (await browser.get("/")).status_code == 200
    async with client(app, authorization=f"Bearer {TOKEN}") as browser:
        assert (await browser.get("/")).status_code == 200


@pytest.mark.parametrize(
    ("where", "path"),
    [("/runs/a/?x=1", "/runs/a/?x=1"), ("//evil", "/"), ("/\\evil", "/"), ("http://evil/", "/")],
)
def test_a_form_leads_to_a_page_of_this_server_only(where: str, path: str) -> None:
    assert local_path(where) == path


async def test_no_address_takes_a_post_unless_control_was_asked_for(runs: Path) -> None:
    made, app = dashboard(runs, TOKEN)
    headers = {"origin": BASE, "authorization": f"Bearer {TOKEN}"}
    async with client(app, **headers) as browser:
        for path in ("/", "/runs/one/", "/runs/one/stop", "/runs/one/scale", "/compare"):
            answer = await browser.post(path, data={"form": made.sessions.form})
            assert answer.status_code in (404, 405), path


async def test_a_run_is_stopped_and_scaled_by_a_form_of_the_page_only(runs: Path) -> None:
    asked: list[Any] = []

    async def stop(now: bool) -> bool:
        asked.append(("stop", now))
        return True

    async def scale(**wanted: int) -> dict[str, int]:
        asked.append(wanted)
        return {}

    made, app = dashboard(runs, TOKEN, control=True)
    own = {"form": made.sessions.form}
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with Control(runs / "one", {"stop": stop, "scale": scale}):
        async with client(app, **bearer) as browser:  # no Origin: not a form of a browser
            assert (await browser.post("/runs/one/stop", data=own)).status_code == 403
        async with client(app, **bearer, origin="http://127.0.0.1:9999") as browser:
            assert (await browser.post("/runs/one/stop", data=own)).status_code == 403
        async with client(app, **bearer, origin=BASE) as browser:
            assert (await browser.post("/runs/one/stop", data={"form": "x"})).status_code == 403
            assert asked == []
            assert (await browser.post("/runs/one/stop", data=own)).status_code == 303
            sizes = {**own, "kind": "generator", "replicas": "3"}
            assert (await browser.post("/runs/one/scale", data=sizes)).status_code == 303
            wrong = {**own, "kind": "generator", "replicas": "many"}
            assert (await browser.post("/runs/one/scale", data=wrong)).status_code == 409
        async with client(app, origin=BASE) as browser:
            assert (await browser.post("/runs/one/stop", data=own)).status_code == 401
    assert asked == [("stop", False), {"generator": 3}]


def test_control_has_a_token_even_on_loopback_and_other_machines_need_one(tmp_path: Path) -> None:
    assert DashboardOptions(folder=tmp_path).token(None) == ""
    assert len(DashboardOptions(folder=tmp_path, control=True).token(None)) >= 32
    with pytest.raises(ServeRefused, match="--token-env"):
        DashboardOptions(folder=tmp_path, host="10.0.0.7").token(None)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    arguments = make_parser().parse_args(["dashboard", str(tmp_path / "nothing")])
    with pytest.raises(UsageError, match="is not a folder"):
        commands.dashboard.run(arguments)


async def test_it_is_served_on_loopback_until_it_is_told_to_end(runs: Path) -> None:
    options = DashboardOptions(folder=runs, port=0)
    async with serving(options, "") as port, httpx.AsyncClient(timeout=60) as browser:
        answer = await browser.get(f"http://127.0.0.1:{port}/runs/one/")
        assert answer.status_code == 200
        async with browser.stream("GET", f"http://127.0.0.1:{port}/runs/one/live") as live:
            async for line in live.aiter_lines():
                if line == "data: charts":
                    break
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


def test_servers_of_the_three_kinds_have_different_ports() -> None:
    ports = {
        ListenOptions().port,
        ServeOptions().port,
        DashboardOptions(folder=Path()).port,
    }
    words = [["serve", "x.toml"], ["serve-env", "toolbox"], ["dashboard", "runs"]]
    assert {make_parser().parse_args(one).port for one in words} == ports
    assert len(ports) == 3
