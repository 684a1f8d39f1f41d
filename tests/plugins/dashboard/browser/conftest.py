"""The dashboard in Debian's Chromium: `nox -s browser`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ASKED_FOR = "COMPOSER_MESH_TEST_BROWSER"
TESTS = Path(__file__).parents[3]
sys.path.insert(0, str(TESTS / "unit" / "helpers"))
sys.path.insert(0, str(TESTS / "procs" / "helpers"))
sys.path.insert(0, str(TESTS.parent / "benchmarks"))
STATE_HOME = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name  # where an account keeps its signing key

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

Visit = Callable[..., Any]


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder with `node_modules`, in which axe-core is installed."""
    folder = os.environ.get(ASKED_FOR)
    if not folder:
        pytest.skip(f"drives Chromium: run `nox -s browser`, which sets {ASKED_FOR}")
    return Path(folder).absolute()


@pytest.fixture(scope="session")
def axe(installed: Path) -> str:
    """The script of axe-core."""
    return (installed / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def chromium(installed: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visitor:
    """A page of Chromium, and what must not happen there: dialogs, requests elsewhere, errors."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self._base = page, base
        self.outside: list[str] = []
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        page.on("request", self._request)
        page.on("dialog", self._dialog)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)

    def open(self, path: str) -> Any:
        self.page.goto(self._base + path, wait_until="load")
        return self.page

    def check_quiet(self) -> None:
        assert (self.outside, self.dialogs, self.errors) == ([], [], [])

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self._base, "data:")):
            self.outside.append(request.url)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _console(self, message: Any) -> None:
        if message.type == "error" and "status of 40" not in message.text:
            self.errors.append(message.text)


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """Open pages of a server: `visit(base, width=390, color_scheme="dark")`."""
    contexts, visitors = [], []

    def opened(base: str, width: int = 1280, height: int = 900, **options: Any) -> Visitor:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        visitors.append(Visitor(context.new_page(), base))
        return visitors[-1]

    yield opened
    for one in visitors:
        one.check_quiet()
    for context in contexts:
        context.close()


@contextmanager
def served(folder: Path, token: str = "", **options: Any) -> Iterator[str]:
    """The dashboard of a folder in a thread of its own; yields its address."""
    from composer_mesh.plugins.dashboard.app import DashboardOptions, serving

    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), list[int]()
    ended = asyncio.Event()

    async def serve() -> None:
        async with serving(DashboardOptions(folder=folder, port=0, **options), token) as port:
            ports.append(port)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`with serve(folder) as base:`"""
    return served
