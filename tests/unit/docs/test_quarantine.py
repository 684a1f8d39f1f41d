"""A test in quarantine fails no run and is listed with what is known of its failure."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
import quarantine
from repository import ROOT

LIST = """
[[test]]
id = "tests/unit/test_a.py::test_one"
since = 2026-11-28
failure = "no answer within 30 s at a load of 19"
tried = "200 repetitions alone, 50 beside a busy loop"
"""


class Item(SimpleNamespace):
    """What is used of a collected test."""

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker.mark)


def marks_of(nodeid: str, text: str = LIST) -> list[Any]:
    item = Item(nodeid=nodeid, markers=[])
    quarantine.mark([item], quarantine.entries(text))  # type: ignore[list-item]
    return list(item.markers)


@pytest.mark.parametrize("case", ["", "[a-b]"])
def test_a_test_of_the_list_may_fail_and_says_why(case: str) -> None:
    (mark,) = marks_of(f"tests/unit/test_a.py::test_one{case}")
    assert (mark.name, mark.kwargs["strict"]) == ("xfail", False)
    assert "since 2026-11-28: no answer within 30 s" in mark.kwargs["reason"]


def test_no_other_test_may_fail() -> None:
    assert marks_of("tests/unit/test_a.py::test_one_more") == []
    assert marks_of("tests/unit/test_b.py::test_one") == []
    assert marks_of("tests/unit/test_a.py::test_one", "") == []


@pytest.mark.parametrize("missing", ["since", "failure", "tried"])
def test_an_entry_without_its_note_is_an_error(missing: str) -> None:
    lines = [line for line in LIST.splitlines() if not line.startswith(missing)]
    with pytest.raises(TypeError, match=missing):
        quarantine.entries("\n".join(lines))


def test_tests_in_quarantine_exist() -> None:
    for entry in quarantine.entries(quarantine.LIST.read_text(encoding="utf-8")):
        file, _, name = entry.id.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")
        assert entry.since <= date.today()
        assert entry.failure
        assert entry.tried
