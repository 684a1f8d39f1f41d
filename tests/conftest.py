"""Suites of tests, and tests in quarantine.

`--suite NAME` collects the files that selection.toml gives to it, and no other. Files of other
suites are not even imported, so a small suite starts at once. quarantine.toml lists tests whose
failures fail no run, and the end of a run lists them. The suite `core` leaves out what is marked
`long`, too (helpers/repetition.py). The garbage collector leaves alone what was collected.
"""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import quarantine
from selection import TESTS, has_files_of, suite_of, suites


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=sorted(suites()), help="collect this suite alone")


def pytest_report_header() -> str:
    """Say which build of torch the tests run with, without importing it."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    found = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return f"torch {found['__version__']}, {'CPU' if found['cuda'] is None else 'CUDA'} build"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of garbage collections: they live until the end of the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is of another suite, before it is imported."""
    suite = config.getoption("suite")
    if suite is None or not collection_path.is_relative_to(TESTS):
        return None
    if collection_path.is_dir():
        return None if has_files_of(suite, collection_path) else True
    return None if suite_of(collection_path) == suite else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quarantine.mark(items, quarantine.entries(quarantine.LIST.read_text(encoding="utf-8")))
    if find_spec("composer_mesh.plugins") is None:
        for item in (item for item in items if item.get_closest_marker("plugins")):
            item.add_marker(pytest.mark.skip(reason="composer_mesh.plugins is missing"))
    if config.getoption("suite") == "core":
        longer = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=longer)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests in quarantine, whatever has become of them."""
    if listed := quarantine.entries(quarantine.LIST.read_text(encoding="utf-8")):
        terminalreporter.section(f"tests in quarantine: {len(listed)}")
    for entry in listed:
        terminalreporter.write_line(str(entry))
