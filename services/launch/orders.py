"""Common parts of all launchers: the config file, and the controller and worker commands."""

from __future__ import annotations

from pathlib import Path, PurePath

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.hosts.certificates import write_private
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.checks.keys import all_key_variables
from composer_mesh.services.launch.ports import Order, Plan

FOLDER, CONFIG_FILE = "launch", "config.toml"
AUTHORITY = ".tls"


def config_file(run: Path) -> Path:
    """Path of the resolved config that a launched run starts with."""
    return run / FOLDER / CONFIG_FILE


def log_file(run: Path) -> Path:
    """Path of the controller's output, for launchers without a log of their own."""
    return run / FOLDER / "controller.log"


def controller_command(
    python: str, run: PurePath, *how: str, config: PurePath | None = None
) -> list[str]:
    """Return the controller's command; `how` is --resume, --auto-resume, or nothing."""
    file = run / FOLDER / CONFIG_FILE if config is None else config
    return python_module(
        "composer_mesh", "train", str(file), "--output", str(run), *how, python=python
    )


def worker_command(
    python: str,
    config: Config,
    roster: PurePath,
    authority: PurePath | None,
    *where: str,
    wait_s: float | None = None,
) -> list[str]:
    """Return a worker's command; `where` has its name and address. Without TLS, no authority.

    The run's API keys may be in the environment that launches it. A worker and what it starts do
    not inherit them: the controller sends them to the actors that use them.
    """
    cluster = config.cluster
    without = [word for name in all_key_variables(config) for word in ("-u", name)]
    words = ["env", *without] if without else []
    words += python_module(
        "composer_mesh", "worker", *where, "--roster", str(roster), python=python
    )
    if authority is not None:
        words += ["--authority", str(authority)]
    wait_s = cluster.attach_s if wait_s is None else wait_s
    words += ["--lease", f"{cluster.lease_s:g}", "--wait", f"{wait_s:g}"]
    for subnet in cluster.subnets:
        words += ["--subnet", subnet]
    return words


def authority_of(order: Order) -> Path:
    """Return the folder of the certificate authority that the hosts of a run trust."""
    return order.config.cluster.authority or order.output / AUTHORITY


def with_config(order: Order, plan: Plan) -> Plan:
    """Return a plan with the common config file before its own files."""
    files = {config_file(order.output): dump_toml(order.config), **plan.files}
    return Plan(files, plan.commands, plan.secret)


def write_files(plan: Plan) -> None:
    """Write a plan's files, each atomically; secret ones are readable by their owner only."""
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in plan.secret:
            write_private(path, text.encode())
        else:
            write_whole(path, text.encode())


def renamed_log(log: Path) -> None:
    """Rename an earlier log to a numbered name, so that a new one can be written."""
    if not log.exists():
        return
    number = 1
    while (place := log.with_name(f"{log.stem}.{number}{log.suffix}")).exists():
        number += 1
    log.rename(place)
