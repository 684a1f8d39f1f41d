"""Runs tests of a tree inside a box and reports each as it ends.

The spec is JSON on standard input: `mark`, `imports` (folders), `files` (of tests), `wanted` (ids,
or null for all), `changed` (files of the agent), `conftest` (whether there is a pristine one).
"""

import gc
import inspect
import json
import pickle
import sys
import unittest

import pytest

from composer_mesh.plugins.code_tasks.judge.programs.auditing import Audit
from composer_mesh.plugins.code_tasks.judge.programs.integrity import Snapshot
from composer_mesh.plugins.code_tasks.judge.programs.pytest_report import (
    ReportPlugin,
    pytest_arguments,
)
from composer_mesh.plugins.code_tasks.judge.programs.reporting import (
    Reporter,
    add_import_folders,
    in_tree,
)

FIRST_LOADED = (gc, inspect, pickle, unittest.case)
"""Modules that are there before agent code is, so that its changes to them are seen."""


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
