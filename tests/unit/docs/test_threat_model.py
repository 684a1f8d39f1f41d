"""The threat model names tests that exist."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

TEXT = (ROOT / "docs" / "threat-model.md").read_text()
FOLDERS = "unit|procs|fuzz|plugins|security"
NAMED = sorted(set(re.findall(rf"`((?:{FOLDERS})/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_a_test_that_the_threat_model_names_exists(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text()
    assert not name or f"def {name}(" in text


def test_every_kind_of_attack_names_a_test() -> None:
    for section in re.split(r"\n### ", TEXT)[1:]:
        assert re.search(rf"`({FOLDERS})/", section), section[:40]
