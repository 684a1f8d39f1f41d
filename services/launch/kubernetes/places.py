"""Paths in the pods of a run, and the config with these paths.

The volume corresponds to the user's folder: `data/tasks.jsonl` here has the same path there.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from composer_mesh.configs.load import dump_toml
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
