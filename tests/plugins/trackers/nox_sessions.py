"""Sessions of experiment trackers."""

from __future__ import annotations

import nox
from nox_helpers import environment, install, pytest, python_of, suite


@nox.session
def trackers(session: nox.Session) -> None:
    """All tests of trackers, also with their packages, whose own readers read what was written."""
    install(session, "trackers")
    suite(session, "trackers")
    folder = "tests/plugins/trackers/packages"
    words = ("-c", f"{folder}/pytest.ini", folder, "-rs")
    pytest(session, *words, python=python_of(environment(session)), PYTHONPATH="src")
