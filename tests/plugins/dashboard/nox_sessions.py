"""Sessions of the dashboard."""

from __future__ import annotations

import nox
from nox_helpers import debian, environment, install, npm, over, pytest, python_of


@nox.session
def browser(session: nox.Session) -> None:
    """The dashboard in Chromium by Playwright: keys, axe-core, screenshots. Needs Node.js."""
    debian(session, ("chromium",), "chromium")
    npm(session, "axe-core@4.14.1")
    over(environment(session))
    install(session, "browser")
    tests = ("tests/plugins/dashboard/browser", "-rs")
    folder = environment(session)
    pytest(session, *tests, python=python_of(folder), COMPOSER_MESH_TEST_BROWSER=folder)
