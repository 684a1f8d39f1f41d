"""Reports each test of a run as it ends. Bundled into every program that runs tests in a box."""

import os
from typing import Any, Protocol

import pytest

LONGEST_FAILURE = 3000
MOST_REPORTED = 50
"""Failures that are reported with their text."""


class Says(Protocol):
    """Takes what happened in a run."""

    def say(self, kind: str, **facts: Any) -> None:
        """Take one line."""


class ReportPlugin:
    """Tells how each test ended; a test has passed if all its phases have."""

    def __init__(self, reporter: Says, wanted: list[str] | None) -> None:
        self._reporter, self._wanted = reporter, None if wanted is None else set(wanted)
        self._phases: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._reported = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._wanted is not None:
            items[:] = [item for item in items if item.nodeid in self._wanted]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._reporter.say("collection", where=str(report.nodeid)[:300], text=_text(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = "xfail" if hasattr(report, "wasxfail") else str(report.outcome)
        if outcome != "passed" and self._phases.get(report.nodeid, "passed") == "passed":
            self._phases[report.nodeid] = outcome
            self._failures[report.nodeid] = _text(report) if self._reported < MOST_REPORTED else ""
            self._reported += 1
        self._phases.setdefault(report.nodeid, outcome)
        if report.when == "teardown":
            self._reporter.say(
                "test",
                id=report.nodeid,
                outcome=self._phases.pop(report.nodeid),
                text=self._failures.pop(report.nodeid, ""),
            )


def _text(report: Any) -> str:
    text = str(getattr(report, "longreprtext", ""))
    return text if len(text) <= LONGEST_FAILURE else f"…{text[-LONGEST_FAILURE:]}"


def pytest_arguments(spec: dict[str, Any]) -> list[str]:
    """Return the command line; no configuration of the tree is read."""
    conftest = [] if spec["conftest"] else ["--noconftest"]
    return [
        *("-q", "-c", os.devnull, f"--rootdir={os.getcwd()}", "-p", "no:cacheprovider"),  # noqa: PTH109
        *("-p", "no:junitxml", "-p", "no:pastebin", "-p", "no:faulthandler", *conftest),
        *spec["files"],
    ]
