"""Runs tests of a tree inside a box and reports each as it ends.

The spec is JSON on standard input: `mark`, `imports` (folders), `files` (of tests), `wanted` (ids,
or null for all), `changed` (files of the agent), `conftest` (whether there is a pristine one).
"""

import gc
import inspect
import json
import os
import pickle
import sys
import unittest
from typing import Any

import pytest

from composer_mesh.tasks.code.judge.programs.auditing import Audit
from composer_mesh.tasks.code.judge.programs.integrity import Snapshot
from composer_mesh.tasks.code.judge.programs.reporting import Reporter, add_import_folders, in_tree

LONGEST_FAILURE = 3000
MOST_TOLD = 50
"""Failures that are reported with their text."""

FIRST_LOADED = (gc, inspect, pickle, unittest.case)
"""Modules that are there before agent code is, so that its changes to them are seen."""


class ReportPlugin:
    """Tells how each test ended; a test has passed if all its phases have."""

    def __init__(self, reporter: Reporter, wanted: list[str] | None) -> None:
        self._reporter, self._wanted = reporter, None if wanted is None else set(wanted)
        self._phases: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._told = 0

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
            self._failures[report.nodeid] = _text(report) if self._told < MOST_TOLD else ""
            self._told += 1
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


def main() -> None:
    spec = json.load(sys.stdin)
    reporter = Reporter(spec["mark"])
    add_import_folders(spec["imports"])
    snapshot, audit = Snapshot(), Audit(in_tree(spec["changed"]))
    plugin = ReportPlugin(reporter, spec["wanted"])
    audit.install()
    status = pytest.main(pytest_arguments(spec), plugins=[plugin])
    reporter.end(status=int(status), tampered=snapshot.changed()[:20], audit=dict(audit.counts))


if __name__ == "__main__":
    main()
