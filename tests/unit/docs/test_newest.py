"""`nox -s newest` installs the project's dependencies without their upper bounds."""

from __future__ import annotations

from pathlib import Path

from newest import newest_requirements
from packaging.requirements import Requirement
from repository import ROOT

PROJECT = """
[project]
name = "p"
dependencies = ["torch==2.13.0", "torchmonarch==0.7.0", "a[x]>=1.2,<2; sys_platform == 'linux'"]
[project.optional-dependencies]
dev = ["p[more]", "b>=3,<4", "torchft==0.2.0"]
more = ["c==1.5"]
unused = ["d"]
"""


def test_bounds_above_go_and_extras_of_extras_come(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(PROJECT)
    assert newest_requirements(project, "dev") == [
        "torchmonarch>=0.8.0.dev0",
        'a[x]>=1.2; sys_platform == "linux"',
        "c>=1.5",
        "b>=3",
        "torchft==0.2.0",
    ]


def test_nothing_of_the_project_but_torchft_keeps_a_bound_above() -> None:
    found = map(Requirement, newest_requirements(ROOT / "pyproject.toml", "dev"))
    bounded = {one.name for one in found if any(b.operator != ">=" for b in one.specifier)}
    assert bounded == {"torchft"}
