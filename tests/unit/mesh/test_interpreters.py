"""How each Python interpreter is started, in all that the package and its examples contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from repetition import LONG
from repository import ROOT

from composer_mesh.mesh.environment import python_code, python_module

PACKAGES = [path.resolve() for path in (ROOT / "src" / "composer_mesh").iterdir() if path.is_dir()]
HELPERS = "mesh/environment.py"
SAFE, MODULE = {"-P", "-I"}, "-m"
PYTHON = re.compile(r"(.*/)?python[\d.]*")
NAMED_ONLY = {
    "mesh/fork_server/protocol.py": "a part of what is compared",
    "mesh/hosts/agent.py": "a part of what a host says of itself",
    "mesh/hosts/worker.py": "a part of its record",
    "mesh/sandboxes/root.py": "copied into boxes",
    "plugins/islands/jobs/by_launch.py": "a part of an order",
    "services/launch/command.py": "a part of an order",
}
"""Files that use the path of the interpreter without starting it."""
STARTERS = {
    "mesh/fork_server/server.py": "replaces a fork",
    "mesh/hosts/guard.py": "becomes the program that it guards",
    "mesh/sandboxes/box_process.py": "becomes a box",
    "mesh/sandboxes/runner.py": "becomes a command in a box",
    "plugins/harbor/containers/box_exec.py": "becomes a command in a container",
    "plugins/harbor/containers/box_keeper.py": "becomes a box",
}
"""Files that replace a process; all others start programs by `mesh.programs`."""


def unsafe(source: str, name: str) -> Iterator[str]:
    """Yield the places of a file that start an interpreter in another way than the helpers do."""
    example = name.startswith("examples/")
    for node in ast.walk(ast.parse(source)):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.List | ast.Tuple):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            first = (
                node.elts[0].value if node.elts and isinstance(node.elts[0], ast.Constant) else ""
            )
            python = not first or (isinstance(first, str) and PYTHON.fullmatch(first))
            if python and {"-m", "-c"} & {*map(str, words)} and not SAFE & {*map(str, words)}:
                yield f"{place} searches the folder where it is started"
            if python and MODULE in words and name != HELPERS and not name.startswith("examples/"):
                yield f"{place} does not use python_module"
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        of = f"{node.value.id}.{node.attr}"
        if of == "sys.executable" and name not in {HELPERS, *NAMED_ONLY} and not example:
            yield f"{place} names the interpreter"
        if re.match(r"os\.(exec|spawn|posix_spawn|system|popen)", of) and name not in STARTERS:
            yield f"{place} starts a program"
        if node.attr.startswith("create_subprocess"):
            yield f"{place} starts a program"


def sources() -> Iterator[tuple[str, str]]:
    for folder in [*PACKAGES, ROOT / "examples"]:
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


@LONG
def test_every_interpreter_is_started_by_one_helper() -> None:
    found = [one for name, text in sources() for one in unsafe(text, name)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'COMMAND = (sys.executable, "-m", "composer_mesh.plugins.openenv.server.worker")',
        'run([python, "-m", "composer_mesh", *words])',
        'run(["/usr/bin/python3.11", "-c", code])',
        "os.execv(path, words)",
        "await asyncio.create_subprocess_exec(*words)",
    ],
)
def test_another_start_is_found(line: str) -> None:
    assert list(unsafe(line.removeprefix("await "), "services/new.py"))


def test_the_helpers_leave_out_the_working_directory() -> None:
    assert python_module("a.b", "x", python="python3") == ["python3", "-P", "-m", "a.b", "x"]
    assert python_code("pass", "x", python="python3") == ["python3", "-I", "-c", "pass", "x"]
