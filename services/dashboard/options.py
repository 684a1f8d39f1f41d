"""Options of the dashboard: the folder of runs, where it listens, whether runs may be changed."""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path

from composer_mesh.services.serve_env.options import ServeOptions, ServeRefused, checked_token

NEEDED = ("starlette", "uvicorn")
TOKEN_BYTES = 24


class DashboardOptions(ServeOptions):
    """Where the runs are, and where the page is served; `control` lets it stop and scale runs."""

    folder: Path
    port: int = 8200
    control: bool = False

    def token(self, token_env: str | None) -> str:
        """Return the token that visitors need; empty on loopback, where nothing can be changed.

        With `control` there is always one: it is made where none is named. Raises ServeRefused.
        """
        found = checked_token(self, token_env)
        return found or (secrets.token_urlsafe(TOKEN_BYTES) if self.control else "")


def check_dashboard_installed() -> None:
    """Raise ServeRefused where the packages of the extra are missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServeRefused(
            f"{', '.join(missing)} is not installed: pip install 'composer-mesh[dashboard]'"
        )
