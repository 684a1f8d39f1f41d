"""Options of an environment server: where it listens, and the limits of its sessions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.configs.schema import Config
from composer_mesh.services.web.options import ListenOptions

NEEDED = {name: name for name in ("starlette", "uvicorn", "wsproto")}


class ServeOptions(ListenOptions):
    """Where a task is served, and the bounds of its sessions. `max_sessions` counts all processes.

    A session that asks for nothing for `session_timeout_s` is ended.
    """

    port: int = Field(default=8000, ge=0, le=65535)
    processes: int = Field(default=1, ge=1, le=256)
    session_timeout_s: float = Field(default=900.0, gt=0, le=7 * 86400)
    max_sessions: int = Field(default=10_000, ge=1, le=10_000_000)


class WorkerStart(BaseModel):
    """What a server process reads first. The token is in no command and no environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: ServeOptions
    config: Config
    folder: str
    number: int
    token: str = Field(default="", repr=False)
