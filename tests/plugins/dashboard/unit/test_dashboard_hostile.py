"""Text of models, tools and teachers is shown as text, on every page and in reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from dashboards import Page, client, dashboard
from hostile_runs import HOSTILE, hostile_group, write_hostile_run

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.live import message
from composer_mesh.plugins.dashboard.report import ReportOptions, report_html

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
