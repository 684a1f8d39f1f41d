"""The helper of the shared runs: each is made once, several at one time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from side_by_side import Make, SideBySide


def together(makes: dict[str, Make], folder: Path, at_once: int = 2) -> SideBySide:
    return SideBySide(makes, folder, folder, at_once)


def test_a_run_is_made_once_in_a_folder_of_its_own_whoever_asks(tmp_path: Path) -> None:
    made: list[str] = []

    def one(_runs: SideBySide, folder: Path) -> str:
        made.append(folder.name)
        return "made"

    with together({"one": one}, tmp_path) as runs:
        runs.start(["one"])
        assert [runs.result("one") for _ in range(3)] == ["made"] * 3
    assert made == ["one"]


def test_runs_are_made_side_by_side_and_may_read_others(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)  # passed only by two at one time

    def one(_runs: SideBySide, _folder: Path) -> int:
        both.wait()
        return 1

    def two(runs: SideBySide, _folder: Path) -> Any:
        both.wait()
        return runs.result("one") + 1

    with together({"one": one, "two": two}, tmp_path) as runs:
        runs.start(["one", "two"])
        assert runs.result("two") == 2


def test_a_run_that_fails_fails_each_test_that_reads_it(tmp_path: Path) -> None:
    def broken(_runs: SideBySide, _folder: Path) -> None:
        raise AssertionError("after 240 s there is still no: first step")

    with together({"broken": broken}, tmp_path) as runs:
        for _ in range(2):
            with pytest.raises(AssertionError, match="still no: first step"):
                runs.result("broken")
