"""One pass of mypy over the package, the benchmarks and the tests: `make types`.

Tests are read for names alone: a module, name, attribute or parameter that there is not. Their
other findings are off, since tests pass on purpose what types forbid. mypy takes such settings by
module name, so this writes a configuration that names all modules of tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".mypy_cache" / "with_tests.toml"
HELPERS = (
    "tests/helpers",
    "tests/unit/helpers",
    "tests/procs/helpers",
    "tests/fuzz/helpers",
    "tests/mutations",
    "tests/plugins/slurm/cluster",
    *(str(one.relative_to(ROOT)) for one in sorted(ROOT.glob("tests/plugins/*/helpers"))),
)
"""Folders whose modules tests import by their bare names."""
CHECKED = (*("helpers", "unit", "procs", "fuzz", "plugins", "mutations", "security"),)
ELSEWHERE = "tests/plugins/(tinker/sdk|frameworks/(areal|data_juicer|prime_rl|verifiers|verl))/"
"""Tests of packages that are not installed here."""
NOT_OF_NAMES = (
    *("arg-type", "assignment", "call-overload", "comparison-overlap", "dict-item"),
    *("func-returns-value", "has-type", "import-untyped", "index", "list-item", "misc"),
    *("no-untyped-def", "operator", "override", "redundant-cast", "redundant-expr"),
    *("return-value", "truthy-bool", "type-var", "union-attr", "unreachable", "valid-type"),
    *("var-annotated", "unused-ignore"),
)


def configuration() -> str:
    """The configuration of pyproject.toml, with that of the modules of tests."""
    modules = {"tests.*"} | {one.stem for place in HELPERS for one in (ROOT / place).glob("*.py")}
    return "\n".join(
        [
            (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
            "[[tool.mypy.overrides]]",
            f"module = {sorted(modules)}",
            f"disable_error_code = {list(NOT_OF_NAMES)}",
            "warn_unused_ignores = false",
        ]
    )


def main() -> int:
    """Run mypy; returns its exit status."""
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(configuration(), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", f"--config-file={CONFIG}", "--explicit-package-bases"]
    command += ["--exclude", ELSEWHERE]
    command += ["src/composer_mesh", "benchmarks", "noxfile.py", "tests/nox_sessions.py"]
    command += ["requirements", *(f"tests/{folder}" for folder in CHECKED)]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(["src", ".", "benchmarks", *HELPERS])}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
