"""What takes minutes or a whole machine of TRL's trainer with three channels: `nox -s trl`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE.parents[2] / "unit" / "helpers", HERE.parents[2] / "procs" / "helpers"):
    sys.path.insert(0, str(folder))
ASKED_FOR = "COMPOSER_MESH_TEST_TRL"


@pytest.fixture(autouse=True, scope="session")
def asked_for() -> None:
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"takes minutes: run `nox -s trl`, or set {ASKED_FOR}=1")
