"""A package that is not there, or is another version, is refused with what to install."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from composer_mesh.plugins.task_packages.requirement import Requirement
from composer_mesh.tasks.errors import UnusableTask


def test_an_absent_package_is_refused_with_the_command_that_installs_it() -> None:
    absent = Requirement("t", "no-such-package-here", "no_such", ("1",), "pip install X")
    with pytest.raises(UnusableTask, match="run pip install X, or make tasks"):
        absent.imported()


def test_another_version_than_the_verified_one_is_refused() -> None:
    other = Requirement("t", "pydantic", "pydantic", ("0.0.1",), "pip install X")
    with pytest.raises(UnusableTask, match=r"verified with pydantic 0\.0\.1"):
        other.imported()


def test_a_package_that_lacks_what_it_needs_is_refused() -> None:
    found = (version("pydantic"),)
    broken = Requirement("t", "pydantic", "pydantic", found, "pip install X")
    assert broken.imported("version").__name__ == "pydantic.version"
    with pytest.raises(UnusableTask, match=r"cannot import pydantic\.no_such_module"):
        broken.imported("no_such_module")
