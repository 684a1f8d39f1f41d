"""PRIME-RL's own loss module at the commit that docs/prime-rl.md names: `nox -s prime-rl`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SOURCE, PACKAGES = "COMPOSER_MESH_PRIME_RL", "COMPOSER_MESH_PRIME_RL_PACKAGES"


@pytest.fixture(scope="session")
def prime_rl() -> dict[str, str]:
    """The environment of a process that imports PRIME-RL's files."""
    if not os.environ.get(SOURCE):
        pytest.skip(f"needs PRIME-RL's repository: run `nox -s prime-rl`, or set {SOURCE}")
    source = Path(os.environ[SOURCE])
    if not (source / "src" / "prime_rl" / "trainer" / "rl" / "loss.py").is_file():
        pytest.fail(f"{source} has no src/prime_rl/trainer/rl/loss.py: name a checkout of PRIME-RL")
    return {**os.environ, "OMP_NUM_THREADS": "1"}
