"""Circles of imports are found, and the package has only those for types that are listed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import import_cycles
import pytest

NUMBERS = itertools.count()
Made = Callable[[dict[str, str]], str]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Writes modules of a new package, in whose texts `{p}` is its name; returns the name."""

    def write(modules: dict[str, str]) -> str:
        package = f"cycles_{next(NUMBERS)}"
        for path, text in {"__init__": "", **modules}.items():
            file = tmp_path / package / f"{path}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(p=package))
        return package

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {p} import a\n"
BY_TYPING = "import typing\nif typing.TYPE_CHECKING:\n    from {p}.a import A\n"
IN_A_FUNCTION = "def late():\n    from {p}.a import A\n    return A\n"
OVER_A_THIRD = {"a": "import {p}.b", "b": "import {p}.below.c", "below/c": "from {p} import a"}


def test_modules_that_import_each_other_in_one_direction_have_no_circle(made: Made) -> None:
    package = made({"a": "from {p} import b, c", "b": "from {p}.c import C", "c": "C = 1"})
    assert import_cycles.faults(package, ()) == []


@pytest.mark.parametrize("back", ["import {p}.a", "from {p} import a", IN_A_FUNCTION])
def test_an_import_back_is_a_circle_also_inside_a_function(made: Made, back: str) -> None:
    package = made({"a": "import {p}.b\nA = 1", "b": back, "c": "import {p}.a"})
    (said,) = import_cycles.faults(package, ())
    assert said == f"import each other when they run: {package}.a, {package}.b"


def test_a_circle_over_a_folder_below_is_found_with_all_its_modules(made: Made) -> None:
    package = made({**OVER_A_THIRD, "below/__init__": ""})
    (circle,) = import_cycles.circles(package, types=False)
    assert circle == (f"{package}.a", f"{package}.b", f"{package}.below.c")


@pytest.mark.parametrize("back", [FOR_TYPES, BY_TYPING])
def test_a_circle_that_types_close_is_a_fault_unless_it_is_listed(made: Made, back: str) -> None:
    package = made({"a": "import {p}.b\nA = 1", "b": back})
    circle = (f"{package}.a", f"{package}.b")
    (said,) = import_cycles.faults(package, ())
    assert said == f"import each other for types: {', '.join(circle)}"
    assert import_cycles.faults(package, [circle]) == []


def test_a_listed_circle_that_grows_runs_or_is_gone_is_a_fault(made: Made) -> None:
    third = (
        "import {p}.b" + "\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {p}.a"
    )
    grown = made({"a": "import {p}.b, {p}.c", "b": FOR_TYPES, "c": third})
    runs = made({"a": "import {p}.b", "b": "import {p}.a"})
    for package in (grown, runs, made({"a": "import {p}.b", "b": ""})):
        assert import_cycles.faults(package, [(f"{package}.a", f"{package}.b")]) != []


def test_no_modules_of_the_package_import_each_other_when_they_run() -> None:
    assert import_cycles.circles("composer_mesh", types=False) == set()


def test_modules_of_the_package_import_each_other_for_types_only_where_it_is_listed() -> None:
    assert import_cycles.faults("composer_mesh", import_cycles.CLOSED_BY_TYPES) == []
