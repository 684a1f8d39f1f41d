"""Makes one script of a program and the modules that it needs, to be sent to a box."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

PACKAGE = "composer_mesh"
HERE = f"{PACKAGE}.plugins.code_tasks.judge.programs"
MAKING = f"{PACKAGE}.plugins.code_tasks.making.programs"
Program = Literal["run_tests", "call_functions", "find_copies", "survey_suite", "try_deletions"]
PLACES: dict[Program, str] = {"survey_suite": MAKING, "try_deletions": MAKING}
"""Packages of programs that are not in this one."""

START = (
    "import os, sys\n"
    "sys.path += [one for one in os.environ.get('PYTHONPATH', '').split(os.pathsep) if one]\n"
    "sys.dont_write_bytecode = True\n"
    "os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
    "[os.environ.pop(name, None) for name in ('PYTEST_ADDOPTS', 'PYTEST_PLUGINS')]\n"
    "size = int(sys.stdin.buffer.readline())\n"
    "exec(compile(sys.stdin.buffer.read(size), 'program', 'exec'))\n"
)
"""Reads the program from standard input, so that no file of the tree is executed."""

ARGV: Sequence[str] = ("python3", "-I", "-c", START)


def stdin_of(program: Program, spec: dict[str, Any]) -> bytes:
    """Return what the process of `ARGV` reads: the length of a program, it, and its spec."""
    text = script(program).encode()
    return b"%d\n%s%s" % (len(text), text, json.dumps(spec).encode("ascii"))


@functools.cache
def script(program: Program) -> str:
    """Return the source of a program, with that of our modules in front of it."""
    parts: dict[str, str] = {}
    _collect(f"{PLACES.get(program, HERE)}.{program}", parts)
    return "\n\n".join(parts.values())


def _collect(module: str, parts: dict[str, str]) -> None:
    """Add the source of a module after those that it imports of ours."""
    tree = ast.parse(_source(module))
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            if node.module not in parts:
                _collect(str(node.module), parts)
        elif not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            kept.append(node)
    parts[module] = ast.unparse(ast.Module(kept, type_ignores=[]))


def _source(module: str) -> str:
    loaded = sys.modules.get(module)
    spec = loaded.__spec__ if loaded is not None else find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
