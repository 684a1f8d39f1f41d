"""Every page in a browser: by keyboard alone, for everyone, on any screen, with hostile text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import large_run, small_run
from dashboards import HOSTILE, write_hostile
from repository import ROOT

from composer_mesh.plugins.dashboard.report import ReportOptions, report_html

WIDTHS = (390, 820, 1440)
ROLLOUT = "/runs/large/rollouts/train-000010-003"
PAGES = {
    "runs": "/",
    "compare": "/compare?run=run-001&run=run-002",
    "overview": "/runs/large/",
    "mesh": "/runs/large/mesh",
    "rollouts": "/runs/large/rollouts",
    "rollout": f"{ROLLOUT}?colour=logprob",
    "group": "/runs/large/groups/10",
    "replay": "/runs/hostile/replay",
    "events": "/runs/hostile/events",
    "config": "/runs/large/config",
    "missing": "/runs/nothing/",
}
SHOTS = ROOT / "build" / "screenshots"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    runs = tmp_path_factory.mktemp("runs")

    def make() -> None:
        for number in range(3):
            small_run(runs, number)
        write_hostile(runs / "hostile", large_run(runs / "large", 480))

    with ThreadPoolExecutor(1) as pool:  # Playwright runs a loop in this thread
        pool.submit(make).result()
    return runs


@pytest.fixture(scope="module")
def base(folder: Path, serve: Any) -> Iterator[str]:
    with serve(folder) as address:
        yield address


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_finding_of_axe(
    base: str, visit: Callable[..., Any], axe: str, name: str, scheme: str
) -> None:
    page = visit(base, color_scheme=scheme).open(PAGES[name])
    page.evaluate(axe)
    found = page.evaluate("axe.run(document)")
    bad = [
        (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found["violations"]
    ]
    assert bad == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_screen(
    base: str, visit: Callable[..., Any], width: int, scheme: str
) -> None:
    """Writes a screenshot of each page, for people to look at."""
    visitor = visit(base, width=width, color_scheme=scheme)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name, path in PAGES.items():
        page = visitor.open(path)
        wide = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        page.screenshot(path=str(SHOTS / f"{name}-{width}-{scheme}.png"), full_page=True)
        assert wide <= 0, (name, wide)


def test_names_of_runs_start_at_one_edge_on_a_phone(base: str, visit: Callable[..., Any]) -> None:
    page = visit(base, width=390).open("/")
    edges = page.evaluate(
        "[...document.querySelectorAll('.runs th a')].map(one => one.getBoundingClientRect().left)"
    )
    assert len(edges) > 3
    assert len(set(edges)) == 1


def test_two_runs_are_compared_with_the_keyboard_alone(
    base: str, visit: Callable[..., Any]
) -> None:
    page = visit(base).open("/")
    page.wait_for_selector(".live-state.on")
    for key in ("/",):
        page.keyboard.press(key)
    page.keyboard.type("run-00")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=run-00**")
    page.wait_for_selector(".live-state.on")
    for key in ("j", "x", "j", "x", "c"):
        page.keyboard.press(key)
    page.wait_for_url("**/compare?run=**run=**")
    assert page.locator("#main ul.legend.big li").count() == 2
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowRight")
    assert "optimizer step 1" in page.inner_text(".tip")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.wait_for_url("**/")


def test_a_rollout_is_found_and_read_with_the_keyboard_alone(
    base: str, visit: Callable[..., Any]
) -> None:
    page = visit(base).open("/runs/large/")
    page.keyboard.press("3")
    page.wait_for_url("**/rollouts")
    page.keyboard.press("]")
    page.wait_for_url("**page=1**")
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("#turn-0")
    page.keyboard.press("j")
    assert page.evaluate("document.querySelector('.turn.at').id") == "turn-0"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_every_page_can_be_read_without_javascript(base: str, visit: Callable[..., Any]) -> None:
    visitor = visit(base, java_script_enabled=False)
    words = {
        "overview": "Reward",
        "rollouts": "480 rollouts",
        "rollout": "turn 0",
        "group": "sample 7",
    }
    for name, word in words.items():
        page = visitor.open(PAGES[name])
        assert word in page.inner_text("main"), name
    page = visitor.open("/runs/large/rollouts")
    page.select_option("select[name=outcome]", "solved")
    page.click("form[role=search] button")
    assert "outcome=solved" in page.url


@pytest.mark.parametrize("sample", range(len(HOSTILE) + 1))
def test_a_hostile_rollout_is_text(base: str, visit: Callable[..., Any], sample: int) -> None:
    visitor = visit(base)
    for path in (f"/runs/hostile/rollouts/0/{sample}", f"/runs/hostile/rollouts/0/{sample}?full=1"):
        page = visitor.open(path)
        page.wait_for_selector("#turn-0")
        page.mouse.move(300, 300)
        assert page.locator("script").count() == 1
        assert page.evaluate("document.querySelectorAll('img, iframe, object, style').length") == 0
    visitor.check_quiet()


def test_hostile_events_and_groups_arrive_as_text(base: str, visit: Callable[..., Any]) -> None:
    visitor = visit(base)
    for path in ("/runs/hostile/events", "/runs/hostile/groups/0", "/runs/hostile/replay", "/"):
        page = visitor.open(path)
        if page.locator("[data-live]").count():
            page.wait_for_selector(".live-state.on")
        page.wait_for_timeout(800)  # for what must not happen
        assert page.locator("img, iframe, #injected").count() == 0
    visitor.check_quiet()


def test_a_report_opens_from_a_file_and_asks_for_nothing(
    folder: Path, tmp_path: Path, visit: Callable[..., Any], axe: str
) -> None:
    names = [f"0/{sample}" for sample in range(len(HOSTILE))]
    options = ReportOptions([folder / "hostile"], tmp_path / "report.html", rollouts=names)
    options.out.write_text(report_html(options))
    visitor = visit(f"file://{tmp_path}")
    page = visitor.open("/report.html")
    assert page.locator("article.rollout").count() == len(HOSTILE)
    assert page.evaluate("getComputedStyle(document.body).margin") == "0px"  # its style is allowed
    blocked = page.evaluate("typeof axe")
    assert json.dumps(blocked) == '"undefined"'
