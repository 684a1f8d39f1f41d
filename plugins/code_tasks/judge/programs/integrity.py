"""Compares functions that agent code has no reason to replace with what they were before it ran."""

import builtins
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

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
