"""Options that all servers share: where one listens, and the token that it requires."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from ipaddress import ip_address

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.configs.installed import is_installed
from composer_mesh.mesh.hosts.address import BadAddress, check_listen, join

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SHORTEST_TOKEN = 16


class ServeRefused(Exception):
    """A server cannot run with these options; the message has the reason and the repair."""


class ListenOptions(BaseModel):
    """Where a server listens, and the names by which requests may address it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535)
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


def checked_token(
    options: ListenOptions, token_env: str | None, environ: MutableMapping[str, str] = os.environ
) -> str:
    """Return the token that clients must send; empty on loopback without `token_env`.

    It is taken out of the environment, which the processes of a server inherit. Raises ServeRefused
    for an address that may not be listened on, or without a token beyond loopback.
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
    token = environ.get(token_env, "")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ServeRefused(
            f"--token-env is {token_env}, which holds {len(token)} characters: set it to at least "
            f"{SHORTEST_TOKEN} printable ASCII ones"
        )
    del environ[token_env]
    return token


def check_installed(packages: Mapping[str, str], extra: str) -> None:
    """Raise ServeRefused where a module is missing; maps modules to names of packages."""
    missing = [package for module, package in packages.items() if not is_installed(module)]
    if missing:
        raise ServeRefused(
            f"{', '.join(missing)} is not installed: pip install 'composer-mesh[{extra}]'"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
