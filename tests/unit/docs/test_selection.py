"""Every test is in one suite, and the suites are what nox and the documentation name."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain, product

import pytest
from repetition import crossed, repeated
from repository import ROOT
from selection import TESTS, files_of_tests, suite_of, suites

PRODUCTS = sorted(suites().keys() - {"core", "long"})


def test_every_path_of_a_suite_exists_and_is_in_one_suite() -> None:
    paths = [*chain.from_iterable(suites().values())]
    assert [path for path in paths if not (TESTS / path).exists()] == []
    assert sorted(set(paths)) == sorted(paths)


def test_every_test_file_is_in_a_suite_and_every_path_has_files_of_tests() -> None:
    files = [*files_of_tests()]
    assert len(files) > 400
    assert [path for path in files if suite_of(path) is None] == []
    for suite, paths in suites().items():
        mine = [path for path in files if suite_of(path) == suite]
        for path in paths:
            assert any(one.is_relative_to(TESTS / path) for one in mine), path


def test_the_core_has_only_unit_tests_and_shared_runs() -> None:
    folders = {
        path.relative_to(TESTS).parts[:2] for path in files_of_tests() if suite_of(path) == "core"
    }
    assert {parts for parts in folders if parts[0] != "unit"} == {("procs", "runs")}


def test_nox_has_a_session_for_each_product_and_the_page_names_all_of_them() -> None:
    command = [sys.executable, "-m", "nox", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sessions = dict(re.findall(r"^- (\S+)(?: -> (.*))?$", listed, re.MULTILINE))
    (row,) = re.findall(
        r"There is one session for each product: (.*?)\. Others test", TABLE, re.DOTALL
    )
    (others,) = re.findall(r"Others test one stack: (.*?)\. Sessions", TABLE, re.DOTALL)
    assert sorted(re.findall(r"[a-z-]+", row)) == PRODUCTS
    assert sessions.keys() >= {*PRODUCTS, *re.findall(r"[a-z-]+", others)}
    assert [name for name, description in sessions.items() if not description] == []
    assert [name for name, description in sessions.items() if len(description) > 95] == []


TABLE = (ROOT / "docs" / "tests.md").read_text(encoding="utf-8")
CLAIMS = re.findall(r"`((?:unit|procs)/[\w/]+\.py)::(\w+)`", TABLE)


@pytest.mark.parametrize(("file", "name"), CLAIMS, ids=lambda part: part.rpartition("/")[2])
def test_a_claim_of_the_readme_is_proved_by_a_test_of_make_test(file: str, name: str) -> None:
    assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")
    assert suite_of(TESTS / file) == "core"


def test_every_core_claim_is_in_the_table_with_a_test() -> None:
    rows = [row for row in TABLE.splitlines() if row.startswith("| ") and "::" in row]
    claims = " ".join(row.split("|")[1] for row in rows)
    words = (
        "trains",
        "heals",
        "bit for bit",
        "lag bound",
        "nothing is lost",
        "nothing is overspent",
    )
    assert [word for word in (*words, "tree") if word not in claims] == []


def test_the_core_has_one_case_of_each_value_and_test_all_has_every_case() -> None:
    cases = crossed("abc", (1, 2))
    core = [case.values for case in cases if not case.marks]
    assert sorted(case.values for case in cases) == sorted(product("abc", (1, 2)))
    assert core == [("a", 1), ("b", 2), ("c", 1)]
    assert [bool(case.marks) for case in repeated(range(4), first=2)] == [False, False, True, True]
