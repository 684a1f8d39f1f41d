"""Runs tests of a tree inside a box and reports each as it ends.

The spec is JSON on standard input: `mark`, `imports` (folders), `files` (of tests), `wanted` (ids,
or null for all), `changed` (files of the agent), `conftest` (whether there is a pristine one).
"""

import builtins
import gc
import inspect
import json
import pickle
import sys
import unittest
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.judge.programs.auditing import Audit
from composer_mesh.plugins.code_tasks.judge.programs.pytest_report import (
    ReportPlugin,
    pytest_arguments,
)
from composer_mesh.plugins.code_tasks.judge.programs.reporting import (
    Reporter,
    add_import_folders,
    in_tree,
)

MODULES = (
    *("json", "json.encoder", "json.decoder", "pickle", "copyreg", "inspect", "gc", "time"),
    *("unittest.case", "unittest.result", "unittest.runner", "pluggy._manager", "pluggy._hooks"),
    *("pluggy._callers", "_pytest.assertion.rewrite", "_pytest.assertion.truncate"),
    *("_pytest.nodes", "_pytest.outcomes", "_pytest.python", "_pytest.raises", "_pytest.reports"),
    *("_pytest.runner", "_pytest.skipping", "_pytest.unittest", "_pytest.main", "_pytest.config"),
    *("_pytest.python_api", "_pytest.terminal", "_pytest.junitxml", "_pytest.session", "pytest"),
)
OS = ("_exit", "write", "read", "dup", "dup2", "fork", "kill", "abort", "waitpid")
SYS = ("exit", "_getframe", "addaudithook", "settrace", "setprofile")
FUNCTIONS = (FunctionType, BuiltinFunctionType, classmethod, staticmethod, property)


class Snapshot:
    """The functions and classes of some modules by name, as they are when it is taken."""

    def __init__(self) -> None:
        import os

        self._modules = {name: sys.modules[name] for name in MODULES if name in sys.modules}
        self._modules |= {"builtins": builtins, "os": os, "sys": sys}
        self._found = self._values()

    def changed(self) -> list[str]:
        """Return the names that stand for something else now, without those that are new."""
        now, names = self._values(), list[str]()
        for name, value in self._found.items():
            if now.get(name) is not value:
                names.append(name)
        names += [n for n, m in self._modules.items() if sys.modules.get(n) is not m]
        return sorted(set(names))

    def _values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in self._modules.items():
            for key, value in self._listed(name, module).items():
                if isinstance(value, FUNCTIONS):
                    found[f"{name}.{key}"] = value
                elif isinstance(value, type):
                    found[f"{name}.{key}"] = value
                    found |= _methods(f"{name}.{key}", name, value)
        return found

    @staticmethod
    def _listed(name: str, module: ModuleType) -> dict[str, Any]:
        wanted = {"os": OS, "sys": SYS}.get(name)
        return {key: value for key, value in vars(module).items() if not wanted or key in wanted}


def _methods(prefix: str, module: str, kind: type) -> dict[str, Any]:
    if kind.__module__ != module:
        return {}  # it is listed where it is defined
    return {
        f"{prefix}.{key}": value
        for key, value in vars(kind).items()
        if isinstance(value, FUNCTIONS)
    }


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
