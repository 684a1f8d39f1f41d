"""Sessions of code tasks."""

from __future__ import annotations

import nox
from nox_helpers import pytest


@nox.session(venv_backend="none")
def attacks(session: nox.Session) -> None:
    """A policy tries attacks on the judge and on boxes at random, for 2,000 episodes."""
    file = "tests/plugins/code_tasks/procs/test_random_attacks.py"
    pytest(session, file, "-rs", "--timeout=14400", COMPOSER_MESH_ATTACK_EPISODES=2000)
