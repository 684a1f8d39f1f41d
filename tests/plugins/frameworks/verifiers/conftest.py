"""Environments of verifiers as they are, in an environment of their own: `nox -s verifiers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "unit" / "helpers", HERE.parents[2] / "procs" / "helpers"):
    sys.path.insert(0, str(folder))

ASKED_FOR = "COMPOSER_MESH_TEST_VERIFIERS"


@pytest.fixture(scope="session")
def verifiers_python() -> Path:
    """The interpreter that has verifiers."""
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"needs 95 packages in a venv: run `nox -s verifiers`, or set {ASKED_FOR}=1")
    python = HERE.parents[3] / ".nox/verifiers/bin/python"
    if not python.exists():
        pytest.fail(f"there is no {python}: run `nox -s verifiers --install-only`")
    return python
