"""Which line of the user's an error names."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.user_code import (
    CustomFunctionError,
    frame_of,
    frame_of_function,
    where_of,
    with_frame,
)
from composer_mesh.losses.custom_function import load_function
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask

MODULE = """
import functools
import json

from composer_mesh.losses.jsd import generalized_jsd

def of_a_library(text):
    return json.loads(text)

def of_ours(scores):
    return generalized_jsd(scores, None, None)

def kept(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@kept
@kept
def decorated(value):
    return None
"""
Write = Callable[[str, str], None]


@pytest.fixture
def module(write_module: Write, tmp_path: Path) -> Path:
    write_module("users_code", MODULE)
    return tmp_path / "users_code.py"


@pytest.mark.parametrize(("name", "line"), [("of_a_library", 8), ("of_ours", 11)])
def test_the_frame_is_the_users_although_a_library_or_we_raised(
    module: Path, name: str, line: int
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        load_function(f"users_code.{name}")("{")
    frame = frame_of(raised.value)
    assert frame.splitlines() == [
        f"{module}:{line}, in {name}",
        f"    {module.read_text().splitlines()[line - 1].strip()}",
    ]
    assert where_of(frame) == f"{module}:{line}"


def test_without_a_line_of_the_user_the_frame_is_that_of_the_caller() -> None:
    with pytest.raises(AttributeError) as raised:
        where_of(None)  # type: ignore[arg-type]
    assert where_of(frame_of(raised.value)).startswith(f"{__file__}:")


def test_a_function_is_named_by_its_definition_below_its_decorators(module: Path) -> None:
    frame = frame_of_function(load_function("users_code.decorated"))
    assert frame == f"{module}:21, in decorated\n    def decorated(value):"
    assert frame_of_function(len) == ""


def test_a_module_that_cannot_be_parsed_is_named_with_its_line(
    write_module: Write, tmp_path: Path
) -> None:
    write_module("unparsed", "x = 1\ny = = 2\n")
    with pytest.raises(CustomFunctionError, match=r"SyntaxError.*\(.*unparsed\.py:2\)") as raised:
        load_function("unparsed.loss")
    assert "y = = 2" in raised.value.frame


ERRORS: list[Any] = [
    CustomFunctionError("m.f", "sequence 0", "it is late", "m.py:3, in f\n    wait()"),
    TaskCodeError("reward 'r'", "m.py:3", "KeyError: 'a'", "m.py:3, in r\n    row['a']"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
def test_an_error_takes_its_frame_to_other_processes_and_shows_it_first(error: Any) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.frame) == (str(error), error.frame)
    assert with_frame(back) == f"{error.frame}\n{error}"
    assert "m.py:3" in str(back)


def test_what_a_task_returned_is_named_once() -> None:
    error = UnusableTask("reward 'r' returned 'None': return a finite number")
    assert with_frame(error) == str(error)
    error.frame = "m.py:3, in r"
    back = pickle.loads(pickle.dumps(error))
    assert str(back).count("m.py:3") == 1
    again = UnusableTask(str(back))
    again.frame = back.frame
    assert str(again) == str(back)
