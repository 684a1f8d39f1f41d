"""Starts Monarch's admin server, and reads the running mesh from it.

Monarch knows processes, queues and failures; the roles of our actors are in a run's status file.
The reader does not import Monarch.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from composer_mesh.mesh.environment import without_noise

if TYPE_CHECKING:
    from monarch.actor import HostMesh

    from composer_mesh.mesh.spawn import MeshHost

START_S, TIMEOUT_S = 60.0, 5.0
TUI_REFRESH_MS = 1000
CONTROLLER_PROC = "local"


@dataclass(frozen=True)
class ActorNode:
    """One of our actors as Monarch reports it."""

    name: str
    status: str
    queue_depth: int
    messages_processed: int


@dataclass(frozen=True)
class ProcNode:
    """One Monarch process; `system_actors` are Monarch's own, which are only counted."""

    name: str
    actors: tuple[ActorNode, ...] = ()
    rss_bytes: int = 0
    queue_depth: int = 0
    poisoned: bool = False
    system_actors: int = 0
    reachable: bool = True
    reference: str = ""


@dataclass(frozen=True)
class HostNode:
    """One host."""

    name: str
    procs: tuple[ProcNode, ...]


@dataclass(frozen=True)
class MeshTree:
    """Hosts, their processes, and the actors in them."""

    hosts: tuple[HostNode, ...]


class AdminUnreachable(ConnectionError):
    """The admin server of a run does not answer."""


_address_of_this_process: list[str] = []


@dataclass(frozen=True)
class TlsFiles:
    """TLS files for the admin server: paths of a certificate, its key and the CA.

    Monarch serves it over TLS where its own transport uses TLS.
    """

    certificate: str
    key: str
    authority: str

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
        """Return this process's TLS files; None if it uses no TLS."""
        found = [environ.get(f"HYPERACTOR_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
        return cls(*found) if all(found) else None

    @classmethod
    def of_status(cls, fields: Mapping[str, str]) -> TlsFiles | None:
        """Read them from a run's status; None where its server uses no TLS."""
        return cls(**fields) if fields else None

    def context(self) -> ssl.SSLContext:
        """Return an SSL context; raises `AdminUnreachable` if the files are gone."""
        try:
            context = ssl.create_default_context(cafile=self.authority)
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise AdminUnreachable(f"{self.certificate}: {error.strerror or error}") from error
        return context


async def start_admin(host: MeshHost) -> str:
    """Start this process's admin server on the loopback interface; return its address.

    Monarch starts only one per process; consecutive runs share it. It requires no token, so it is
    never bound to another interface, and `connection_guard` refuses other users.
    """
    if not _address_of_this_process:
        url = await asyncio.to_thread(
            _start_quietly,
            [host.here.mesh, *(one.mesh for one in host.hosts.values())],
        )
        _address_of_this_process.append(url.replace("//localhost:", "//127.0.0.1:"))
    return _address_of_this_process[0]


def _start_quietly(meshes: list[HostMesh]) -> str:
    from monarch._src.actor.host_mesh import (
        _spawn_admin,
    )  # imported lazily, so that reading is cheap

    with without_noise():
        starting = _spawn_admin(meshes, "127.0.0.1:0")
        url: str = starting.get(START_S)[0]
    return url


def read_mesh(url: str, tls: TlsFiles | None = None) -> MeshTree:
    """Walk the mesh from its root. Waits for one small response per host, process and actor."""
    try:
        with httpx.Client(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=_verify(tls)
        ) as client:
            return MeshTree(tuple(_hosts(client)))
    except httpx.HTTPError as error:
        raise AdminUnreachable(f"{url} does not answer ({error}): has the run ended?") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise AdminUnreachable(
            f"{url} does not answer as an admin server does ({type(error).__name__}): has the run "
            "ended, and another program its port?"
        ) from None


def _verify(tls: TlsFiles | None) -> ssl.SSLContext:
    """Return the context of a run's TLS files; without them one that trusts no authority.

    The latter loads none either, and `tree --watch` asks every second.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls.context()


def open_tui(url: str, tls: TlsFiles | None = None) -> None:
    """Open Monarch's own terminal interface on an admin server, until the user quits it."""
    from monarch._rust_bindings.monarch_extension.mesh_admin_tui import run

    run(
        url.removeprefix("http://").removeprefix("https://"),
        admin_port=None,
        refresh_ms=TUI_REFRESH_MS,
        theme="nord",
        lang="en",
        tls_ca=None if tls is None else tls.authority,
        tls_cert=None if tls is None else tls.certificate,
        tls_key=None if tls is None else tls.key,
        plaintext=tls is None,
    )


def _hosts(client: httpx.Client) -> Iterator[HostNode]:
    for reference in _require(client, "root")["children"]:
        node = _require(client, reference)
        procs = tuple(_proc(client, child) for child in node["children"])
        yield HostNode(node["properties"]["Host"]["addr"], procs)


def _proc(client: httpx.Client, reference: str) -> ProcNode:
    node = _get(client, reference)
    if node is None:
        return ProcNode(_name(reference), reachable=False, reference=reference)
    about = node["properties"]["Proc"]
    debug = about.get("debug") or {}
    system = set(about["system_children"])
    return ProcNode(
        name=about["proc_name"],
        actors=tuple(_actors(client, [c for c in node["children"] if c not in system])),
        rss_bytes=(debug.get("memory") or {}).get("process_rss_bytes") or 0,
        queue_depth=debug.get("actor_work_queue_depth_total") or 0,
        poisoned=about["is_poisoned"],
        system_actors=len(system),
        reference=reference,
    )


def _actors(client: httpx.Client, references: list[str]) -> Iterator[ActorNode]:
    for reference in references:
        node = _get(client, reference)
        about = node["properties"].get("Actor") if node else None
        if about is not None and not about.get("is_system"):
            status = about["actor_status"].partition("\n")[0]
            yield ActorNode(
                _name(reference), status, about["queue_depth"], about["messages_processed"]
            )


def _get(client: httpx.Client, reference: str) -> dict[str, Any] | None:
    """Return one node, None if it is gone: a killed process is still listed by its host."""
    response = client.get(f"/v1/{quote(reference, safe='')}")
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    node: dict[str, Any] = response.raise_for_status().json()
    return node


def _require(client: httpx.Client, reference: str) -> dict[str, Any]:
    node = _get(client, reference)
    if node is None:
        raise AdminUnreachable(f"{reference} is unknown to the admin server: has the run ended?")
    return node


def _name(reference: str) -> str:
    return reference.partition("<")[0].partition("@")[0]
