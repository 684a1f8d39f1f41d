"""What every launcher needs of an order: the config as a file, and the controller's own command.

Nothing here knows a kind of cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

from composer_mesh.configs.load import dump_toml
from composer_mesh.services.launch.ports import Order, Plan
from composer_mesh.services.store.whole_files import write_whole

FOLDER = "launch"
AUTHORITY = ".tls"


def config_file(run: Path) -> Path:
    """The resolved config that a launched run begins with."""
    return run / FOLDER / "config.toml"


def config_text(order: Order) -> str:
    """That config; its paths mean the same on all hosts."""
    return dump_toml(order.config)


def log_file(run: Path) -> Path:
    """What the controller prints, where a launcher has nothing of its own for that."""
    return run / FOLDER / "controller.log"


def controller_command(python: str, run: Path, *how: str) -> list[str]:
    """What runs where the controller is; `how` is --resume, --auto-resume, or nothing."""
    config = str(config_file(run))
    return [python, "-m", "composer_mesh", "train", config, "--output", str(run), *how]


def authority_of(order: Order) -> Path:
    """The folder of the certificate authority that the hosts of a run trust."""
    return order.config.cluster.authority or order.output / AUTHORITY


def with_config(order: Order, plan: Plan) -> Plan:
    """A plan with the file that all have in common, before its own."""
    files = {config_file(order.output): config_text(order), **plan.files}
    return Plan(files, plan.commands, plan.secret)


def write_files(plan: Plan) -> None:
    """Write what a plan says, each file as a whole; a secret one for its owner alone."""
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in plan.secret:
            _write_secret(path, text)
        else:
            write_whole(path, text.encode())


def _write_secret(path: Path, text: str) -> None:
    """Nobody else can read it, from its first byte on."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def renamed_log(log: Path) -> None:
    """Make room for a new log; the earlier one is kept under a number."""
    if not log.exists():
        return
    number = 1
    while (place := log.with_name(f"{log.stem}.{number}{log.suffix}")).exists():
        number += 1
    log.rename(place)
