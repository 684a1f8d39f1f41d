"""Options of the dashboard: the folder of runs, where it listens, whether runs may be changed."""

from __future__ import annotations

import secrets
from pathlib import Path

from composer_mesh.services.web.options import ListenOptions, checked_token

NEEDED = {name: name for name in ("starlette", "uvicorn")}
TOKEN_BYTES = 24


class DashboardOptions(ListenOptions):
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
