"""Benchmarks in their smallest form: which there are, which a commit chooses, what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import quick
from report import MISSING_STATUS, Report


def test_every_benchmark_with_a_smallest_form_is_run() -> None:
    names = {*quick.benchmarks(), *quick.NEED_ARGUMENTS}
    takes = [
        one for one in quick.FOLDER.glob("*.py") if "import Report, arguments" in one.read_text()
    ]
    assert {one.stem for one in takes} <= names
    assert len(names) > 20


def test_those_that_are_left_out_cannot_start_without_an_argument() -> None:
    for name in quick.NEED_ARGUMENTS:
        source = (quick.FOLDER / f"{name}.py").read_text()
        assert re.search(r'add_argument\("\w', source), name


def test_a_commit_chooses_the_same_benchmarks_each_time_and_commits_choose_all() -> None:
    assert quick.chosen("ab12", 2) == quick.chosen("ab12", 2)
    every = {name for commit in range(150) for name in quick.chosen(f"{commit:x}", 2)}
    assert every == set(quick.benchmarks())


def test_a_missing_ratio_is_reported_with_the_reason_and_exit_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("some", ratios={"ours_over_theirs": 2.0}, missing={"ours_over_peer": "no peer"})
    with pytest.raises(SystemExit) as ended:
        report.finish(tmp_path / "some.json")
    assert ended.value.code == MISSING_STATUS == 3
    assert capsys.readouterr().out == "ours_over_theirs = 2\nours_over_peer is missing: no peer\n"
    assert json.loads((tmp_path / "some.json").read_text())["missing"] == {
        "ours_over_peer": "no peer"
    }


def test_a_report_without_a_missing_ratio_ends_nothing() -> None:
    Report("some", ratios={"ours_over_theirs": 2.0}).finish(None)
