"""verl 0.9.1 itself, in an environment of its own: `nox -s verl`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "unit" / "helpers", HERE.parents[2] / "procs" / "helpers"):
    sys.path.insert(0, str(folder))
ASKED_FOR = "COMPOSER_MESH_TEST_VERL"


@pytest.fixture(autouse=True, scope="session")
def asked_for() -> None:
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"needs verl in a venv: run `nox -s verl`, or set {ASKED_FOR}=1 in it")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny policy."""
    from learning import write_policy

    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder)
    return folder
