"""Attacks that need other users, mounts or namespaces: `nox -s security`, as root.

The tests make their own users, namespaces and tmpfs, and remove them. They are skipped without root
and by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "procs" / "helpers"))

ASKED_FOR = "COMPOSER_MESH_TEST_SECURITY"


@pytest.fixture(autouse=True)
def _asked_for_and_root() -> None:
    if not os.environ.get(ASKED_FOR):
        pytest.skip(
            f"makes users, mounts and namespaces: run `nox -s security`, or set {ASKED_FOR}=1"
        )
    if os.geteuid() != 0:
        pytest.skip("needs root, to make users, mounts and namespaces of its own")
