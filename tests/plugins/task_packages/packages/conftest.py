"""Tasks of packages with the packages themselves: `nox -s tasks`."""

from __future__ import annotations

import os

import pytest

ASKED_FOR = "COMPOSER_MESH_TEST_TASKS"


@pytest.fixture(autouse=True)
def _asked_for() -> None:
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"needs the packages: run `nox -s tasks`, or set {ASKED_FOR}=1")


def pytest_configure(config: pytest.Config) -> None:
    """What the packages import warns of its own syntax, once, when it is compiled first."""
    config.addinivalue_line("filterwarnings", "ignore::SyntaxWarning")
