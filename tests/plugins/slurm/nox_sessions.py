"""Sessions of Slurm."""

from __future__ import annotations

import nox
from nox_helpers import debian, pytest, suite


@nox.session(venv_backend="none")
def slurm(session: nox.Session) -> None:
    """All tests of Slurm, also as jobs of a real one, in ten minutes."""
    debian(session, ("slurmctld", "slurmd", "munged"), "slurm-wlm", "munge")
    suite(session, "slurm")
    pytest(session, "tests/plugins/slurm/cluster", "-rs", COMPOSER_MESH_TEST_SLURM=1)
