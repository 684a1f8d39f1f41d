"""Options of an environment server: where it listens, and the limits of its sessions."""

from __future__ import annotations

import importlib.util
import os
from ipaddress import ip_address

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.hosts.address import BadAddress, check_listen, join

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
NEEDED = ("starlette", "uvicorn", "wsproto")
SHORTEST_TOKEN = 16


class ServeRefused(Exception):
    """A task cannot be served as asked; the message says why, and what to do instead."""


class ServeOptions(BaseModel):
    """Where a task is served, and the bounds of its sessions. `max_sessions` counts all processes.

    A session that asks for nothing for `session_timeout_s` is ended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    processes: int = Field(default=1, ge=1, le=256)
    session_timeout_s: float = Field(default=900.0, gt=0, le=7 * 86400)
    max_sessions: int = Field(default=10_000, ge=1, le=10_000_000)
    allowed_hosts: tuple[str, ...] = ()
    any_address: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Hosts that requests may name."""
        return frozenset((*LOOPBACK_NAMES, self.host, *self.allowed_hosts))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or _is_loopback(self.host)


class WorkerStart(BaseModel):
    """What a server process reads first. The token is in no command and no environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: ServeOptions
    config: Config
    folder: str
    number: int
    token: str = Field(default="", repr=False)


def checked_token(options: ServeOptions, token_env: str | None) -> str:
    """Return the token that clients must send; empty on loopback without `token_env`.

    Raises ServeRefused for an address that may not be listened on, or without a token beyond
    loopback.
    """
    try:
        check_listen(join("tcp", options.host, options.port), any_address=options.any_address)
    except BadAddress as bad:
        raise ServeRefused(f"--host {options.host}: {bad}") from None
    if token_env is None:
        if options.is_loopback:
            return ""
        raise ServeRefused(
            f"--host is {options.host}, which other machines reach: name the environment variable "
            "with the token that clients must send, with --token-env"
        )
    token = os.environ.get(token_env, "")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ServeRefused(
            f"--token-env is {token_env}, which holds {len(token)} characters: set it to at least "
            f"{SHORTEST_TOKEN} printable ASCII ones"
        )
    return token


def check_installed() -> None:
    """Raise ServeRefused where the packages of the extra are missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServeRefused(
            f"{', '.join(missing)} is not installed: pip install 'composer-mesh[serve-env]'"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
