"""What `nox -s newest` installs: each dependency without its upper bound."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

AS_LOCKED = ("torch", "torchft")
"""torch's build depends on the machine, and torchft's client is of its own protocol version."""
DEVELOPED = {"torchmonarch": SpecifierSet(">=0.8.0.dev0")}
"""Packages whose development release is tested."""


def newest_requirements(project: Path, *extras: str) -> list[str]:
    """Requirements of a pyproject.toml and of extras, without torch, and without upper bounds."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found = list(_direct(about["dependencies"], about, extras))
    return [str(_unbounded(one)) for one in found if one.name != "torch"]


def _direct(
    lines: list[str], about: dict[str, object], extras: tuple[str, ...]
) -> Iterator[Requirement]:
    known = about["optional-dependencies"]
    assert isinstance(known, dict)
    for line in [*lines, *(one for extra in extras for one in known[extra])]:
        one = Requirement(line)
        if one.name == about["name"]:
            yield from _direct([], about, tuple(one.extras))
        else:
            yield one


def _unbounded(one: Requirement) -> Requirement:
    if one.name in AS_LOCKED:
        return one
    least = (f">={bound.version}" for bound in one.specifier if bound.operator in (">=", "=="))
    one.specifier = DEVELOPED.get(one.name) or SpecifierSet(",".join(least))
    return one
