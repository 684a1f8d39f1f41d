"""mypy reads package, benchmarks and tests in one pass, and tests for names alone."""

from __future__ import annotations

import tomllib

import check_types
from repository import ROOT


def test_every_module_that_tests_import_by_a_bare_name_is_read_as_a_test() -> None:
    config = tomllib.loads(check_types.configuration())["tool"]["mypy"]
    (tests,) = [one for one in config["overrides"] if "tests.*" in one["module"]]
    helpers = {path.stem for path in (ROOT / "tests").rglob("helpers/*.py")}
    assert len(helpers) > 100
    assert helpers <= set(tests["module"])
    assert "name-defined" not in tests["disable_error_code"]
    assert "attr-defined" not in tests["disable_error_code"]
    assert "call-arg" not in tests["disable_error_code"]
    assert "import-not-found" not in tests["disable_error_code"]


def test_no_module_of_the_package_or_a_benchmark_is_read_as_a_test() -> None:
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    names = {
        name
        for one in tomllib.loads(check_types.configuration())["tool"]["mypy"]["overrides"]
        if "tests.*" in one["module"]
        for name in one["module"]
    }
    assert not benchmarks & names
    assert not [name for name in names if name.startswith("composer_mesh")]
