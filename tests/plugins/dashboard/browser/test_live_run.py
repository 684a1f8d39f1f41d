"""A person watches a quickstart in the browser while it trains."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_run import ENDLESS, LiveRun, launched

ARRIVES_S = 2.0
"""Longest time from a line of metrics.jsonl to the page, on a machine with nothing else to do."""
HEALS_MS = 60_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Iterator[LiveRun]:
    root = tmp_path_factory.mktemp("live") / "runs"
    root.mkdir()
    with launched(root / "quickstart", root.parent / "policies", ENDLESS) as run:
        run.until_training()
        yield run


@pytest.fixture
def page(run: LiveRun, serve: Any, visit: Callable[..., Any]) -> Iterator[Any]:
    with serve(run.root.parent) as base:
        visitor = visit(base)
        yield visitor.open("/")
        visitor.page.close()


def test_steps_arrive_within_two_seconds(run: LiveRun, page: Any) -> None:
    page.click("text=quickstart")
    page.wait_for_selector(".live-state.on")
    waited = []
    for _ in range(3):
        written = len(run.lines("metrics.jsonl"))
        run.until(lambda one, seen=written: len(one.lines("metrics.jsonl")) > seen, "next step")
        began = time.monotonic()
        page.wait_for_function(
            "step => Number(document.querySelector('#figures .line b').textContent) > step",
            arg=written,
        )
        waited.append(time.monotonic() - began)
    assert min(waited) < ARRIVES_S, waited
    assert page.locator("#charts figure").count() >= 8


def test_a_killed_generator_turns_red_and_heals(run: LiveRun, page: Any) -> None:
    page.click("text=quickstart")
    page.click("text=Mesh and timeline")
    row = page.locator('tr[data-actor^="generator-0"]').first
    row.wait_for()
    os.kill(run.pids()["generator-0"], signal.SIGKILL)
    red = page.locator('tr[data-actor="generator-0"][data-state="dead"]')
    red.wait_for(timeout=HEALS_MS)
    colour = red.locator("td").first.evaluate("one => getComputedStyle(one).color")
    channels = [int(one) for one in re.findall(r"\d+", colour)[:3]]
    assert channels[0] > 1.5 * max(channels[1:]), colour
    healed = page.locator(
        'tr[data-actor="generator-0.2"]:is([data-state="ready"], [data-state="busy"])'
    )
    healed.wait_for(timeout=HEALS_MS)
    assert page.locator("ol.events li.bad", has_text="actor_died").count()
    assert page.locator("ol.events li.good", has_text="actor_restarted").count()
    assert page.locator("#timeline svg.lane").count() >= 3


def test_rollouts_are_filtered_and_one_is_read(run: LiveRun, page: Any) -> None:
    page.click("text=quickstart")
    page.click("nav.tabs >> text=Rollouts")
    page.select_option("select[name=outcome]", "failed")
    page.click("form[role=search] button")
    column = page.locator("table.rollouts th").all_inner_texts().index("outcome") + 1
    outcomes = page.locator(f"table.rollouts td:nth-child({column})").all_inner_texts()
    assert outcomes
    assert set(outcomes) == {"✗ failed"}
    page.locator("table.rollouts a[data-open]").first.click()
    page.wait_for_selector("#turn-0")
    page.click("text=by log-prob")
    assert page.locator("#turn-0 .token").count() > 1
    page.click("#turn-0 h3 a")
    assert page.url.endswith("#turn-0")
    page.click("article a >> text=/^group/")
    assert page.locator(".column").count() >= 2


def test_a_run_is_stopped_from_the_page_where_that_was_asked_for(
    run: LiveRun, serve: Any, visit: Callable[..., Any]
) -> None:
    """The last test of this file: the run ends with it."""
    with serve(run.root.parent, token="a-token-of-the-tests", control=True) as base:
        page = visit(base).open("/runs/quickstart/")
        assert "needs the token" in page.inner_text("main")
        page.fill("input[name=token]", "a-token-of-the-tests")
        page.click("main button")
        page.click("text=Stop after a checkpoint")
        run.process.wait(120)
        page.wait_for_selector(".state.stopped")
    assert run.events("run_stopped")
