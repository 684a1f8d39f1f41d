"""Live pages: how many there may be, what one that was left frees, and processes that died.

Text of models, tools and teachers is shown as text, on every page and in reports. docs/dashboard.md
says what the commands and the page do.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from dashboards import HOSTILE, Page, client, dashboard, hostile_group, write_hostile_run
from guides import ROOT, Guide
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.app import MOST_COMPARED, DashboardOptions
from composer_mesh.plugins.dashboard.live import LiveConnections, PageParts, message
from composer_mesh.plugins.dashboard.pages import LONGEST_SHOWN
from composer_mesh.plugins.dashboard.report import ReportOptions, report_html
from composer_mesh.plugins.dashboard.series import MOST_POINTS
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.web.http_server import http_config, listening, listening_socket

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


SAMPLES = range(len(HOSTILE) + 1)


PAGES = [
    *("/", "/?q=<script>", "/compare?run=hostile", "/compare?run=<script>", "/runs/<script>/"),
    *("/runs/hostile/", "/runs/hostile/mesh", "/runs/hostile/events", "/runs/hostile/replay"),
    *("/runs/hostile/config", "/runs/hostile/groups/0", "/runs/hostile/rollouts"),
    "/runs/hostile/rollouts?error=<script>alert(1)</script>&step='\"><b>&sort=<i>",
    "/runs/hostile/events?kind='\"><script>",
    "/runs/hostile/rollouts/<script>alert(1)</script>",
    *(f"/runs/hostile/rollouts/0/{sample}" for sample in SAMPLES),
    "/runs/hostile/rollouts/0/0?colour=logprob",
    "/runs/hostile/rollouts/0/13?full=1",
]


INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe]")


@pytest.fixture
async def hostile(tmp_path: Path, build_config: Callable[..., Config]) -> Path:
    await write_hostile_run(tmp_path / "hostile", build_config(), long_line=200_000)
    return tmp_path


async def test_no_page_holds_anything_but_its_own_elements(hostile: Path) -> None:
    _, app = dashboard(hostile)
    async with client(app) as browser:
        for path in PAGES:
            answer = await browser.get(path)
            assert answer.status_code in (200, 404), path
            Page(answer.text).check_harmless()
            assert INVISIBLE.search(answer.text) is None, path
            assert "1337" not in answer.text, path  # 7 * 191: no template was filled in
            assert len(answer.content) < 2_000_000, path
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")


async def test_a_hostile_text_can_be_read_on_its_page(hostile: Path) -> None:
    _, app = dashboard(hostile)
    async with client(app) as browser:
        texts = [
            Page((await browser.get(f"/runs/hostile/rollouts/0/{n}")).text).text for n in SAMPLES
        ]
    for text, page in zip(HOSTILE.values(), texts, strict=False):
        first = "".join(takewhile(str.isprintable, text))
        assert first[:30] in page
    assert "\\u202e" in texts[list(HOSTILE).index("direction")]
    assert "\\x1b[31m" in texts[list(HOSTILE).index("terminal")]
    assert "A" * 10_000 in texts[-1]


def test_a_report_loads_and_runs_nothing(hostile: Path, tmp_path: Path) -> None:
    names = [f"0/{sample}" for sample in SAMPLES]
    html = report_html(ReportOptions([hostile / "hostile"], tmp_path / "out.html", rollouts=names))
    page = Page(html)
    assert [tag for tag, _ in page.elements if tag in ("script", "link", "img", "iframe")] == []
    addresses = [about["href"] for tag, about in page.elements if tag == "a"]
    assert all(address.startswith("#rollout-") for address in addresses)
    assert INVISIBLE.search(html) is None
    assert "default-src 'none'; style-src 'sha256-" in html


def test_no_text_can_end_a_live_event() -> None:
    told = message("events", "a\ndata: main\n\nevent: x\r\rdata: b\x0b\u2028c")
    lines = told.split("\n")
    assert lines[-2:] == ["", ""]
    assert all(line.startswith("data: ") for line in lines[:-2])
    assert "\r" not in told


def test_the_battery_is_what_it_says() -> None:
    assert len(hostile_group(10)) == len(HOSTILE) + 1


PAGE = Guide.read("dashboard.md")


SCRIPT = (ROOT / "plugins" / "dashboard" / "static" / "app.js").read_text()


def test_every_command_of_the_page_is_one() -> None:
    shown = re.findall(r"^    (?:\w+=\S+ )?composer-mesh (.*?)(?:  .*)?$", PAGE.text, re.MULTILINE)
    assert len(shown) == 4
    for command in shown:
        words = [word for word in shlex.split(command) if word != "[RUNS_DIR]"]
        make_parser().parse_args(words)


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"http://127.0.0.1:{DashboardOptions.model_fields['port'].default}/" in PAGE.text
    assert f"up to {MOST_COMPARED} runs" in PAGE.text
    assert f"at most {MOST_POINTS} points" in PAGE.text
    assert f"at most {LONGEST_SHOWN:,} characters" in PAGE.text


def test_every_key_of_the_page_does_something() -> None:
    keys = re.search(r"Everything can be done with the keyboard: .*?all keys", PAGE.text, re.DOTALL)
    assert keys is not None
    for key in re.findall(r"`(\S)`", keys.group()):
        assert key.isdecimal() or re.search(rf'^  ("?){re.escape(key)}\1: ', SCRIPT, re.MULTILINE)
