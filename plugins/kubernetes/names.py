"""Names of a run's Kubernetes objects, and which names are refused.

A run is named like its directory, a host as in `[placement]`; names of objects are more restricted.

Paths in the pods of a run, and the config with these paths.

The volume corresponds to the user's folder: `data/tasks.jsonl` here has the same path there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.placement import HostConfig
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.hosts.roster import ROSTER
from composer_mesh.services.launch.ports import LaunchRefused, Order

AUTHORITY = PurePosixPath("/etc/composer-mesh/authority")
CONFIG = PurePosixPath("/etc/composer-mesh/run")
CONFIG_FILE = "config.toml"
MOST = 1_000_000
"""Largest config in bytes: Kubernetes allows no larger ConfigMap."""


def run_there(order: Order) -> PurePosixPath:
    """Return the run's directory in the pods."""
    return mount(order) / order.output.name


def roster_there(order: Order) -> PurePosixPath:
    """Return the folder in which the pods' workers announce themselves."""
    return run_there(order) / ROSTER


def mount(order: Order) -> PurePosixPath:
    """Return the volume's mount point in the pods, their working directory."""
    return PurePosixPath(order.config.cluster.kubernetes.mount)


def python_there(order: Order) -> str:
    """Return the interpreter of the image."""
    return order.config.cluster.python or "python"


def config_there(order: Order) -> str:
    """Return the run's config for the controller, as TOML; raises `LaunchRefused`."""
    config = order.config
    if config.cluster.authority is not None:
        raise LaunchRefused(
            f"cluster.authority is {config.cluster.authority} but on Kubernetes each launch makes "
            "an authority of its own, which is kept in a Secret: remove cluster.authority"
        )
    moved = _moved(config.model_dump(), order.folder, Path(mount(order)))
    moved["cluster"]["authority"] = str(AUTHORITY)
    text = dump_toml(Config.model_validate(moved))
    if len(text.encode()) > MOST:
        raise LaunchRefused(
            f"the config has {len(text.encode())} bytes but a ConfigMap {MOST} at most: move long "
            "texts of it into files"
        )
    return text


def _moved(value: Any, folder: Path, there: Path) -> Any:
    """Move each path below the user's folder, or relative to it, to `there`."""
    if isinstance(value, Path):
        whole = folder / value
        return there / whole.relative_to(folder) if whole.is_relative_to(folder) else value
    if isinstance(value, dict):
        return {key: _moved(one, folder, there) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(one, folder, there) for one in value)
    return value


RUN, ROLE, HOST = "composer-mesh/run", "composer-mesh/role", "composer-mesh/host"
CONTROLLER, WORKER, CLAIM = "controller", "worker", "claim"
LONGEST = 52
"""Longest name of an object: Kubernetes appends eleven characters for a label of the pods."""


@dataclass(frozen=True)
class HostGroup:
    """Identical hosts: one object with one pod per host."""

    host: HostConfig
    object: str

    @property
    def worker_name(self) -> str:
        """The host name in the placement, which the pod builds from its own index."""
        return self.host.name if self.host.count == 1 else f"{self.host.name}-$(POD_INDEX)"


def run_name(run: Path | PurePosixPath) -> str:
    """Return the name prefix of a run's objects; raises `LaunchRefused` if it would be empty."""
    name = dns(run.name)
    if not name:
        raise LaunchRefused(
            f"the run's directory is called {run.name!r}, of which Kubernetes accepts no letter: "
            "name another with --output, such as runs/quickstart"
        )
    return name


def groups_of(order: Order) -> tuple[HostGroup, ...]:
    """Return the described hosts with names for their objects; raises `LaunchRefused`."""
    run, mesh = run_name(order.output), _is_mesh(order)
    described = order.config.placement.hosts
    groups = tuple(HostGroup(host, _object(run, host.name, mesh)) for host in described)
    _check(run, groups)
    return groups


def labels(run: str, role: str) -> dict[str, str]:
    """Return the labels of every object and pod of a run.

    Monarch's operator sets its own app.kubernetes.io/name on pods, so no selector uses that.
    """
    return {
        "app.kubernetes.io/name": "composer-mesh",
        "app.kubernetes.io/instance": run,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": "composer-mesh",
        RUN: run,
        ROLE: role,
    }


def selector(of: Mapping[str, str]) -> str:
    """Return labels as a kubectl selector."""
    return ",".join(f"{key}={value}" for key, value in of.items())


def dns(text: str) -> str:
    """Reduce a name to the characters allowed in an object's name, starting with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"run-{plain}" if plain[:1].isdecimal() else plain


def _is_mesh(order: Order) -> bool:
    return order.config.cluster.kubernetes.flavour == "monarchmesh"


def _object(run: str, host: str, mesh: bool) -> str:
    """Return an object's name; a MonarchMesh may not have dashes in its name, other objects may."""
    name = f"{run}-{re.sub(r'[^a-z0-9]+', '-', host.lower()).strip('-')}"
    return name.replace("-", "") if mesh else name


def _check(run: str, groups: tuple[HostGroup, ...]) -> None:
    names = [f"{run}-{CONTROLLER}", *(group.object for group in groups)]
    for group in groups:
        if names.count(group.object) > 1:
            raise LaunchRefused(
                f"host {group.host.name!r} of placement.hosts would be called {group.object!r} in "
                "Kubernetes, and so would another object of the run: give it another name"
            )
    for name in names:
        if len(name) > LONGEST:
            raise LaunchRefused(
                f"{name!r} has {len(name)} letters but the name of an object {LONGEST} at most: "
                "name a shorter directory with --output, or shorter hosts in placement.hosts"
            )
