"""How the weights of a run travel: chosen once, at its start, and then the same for every actor.

What a transport does is `mesh.weights`; what it is chosen by, too.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.weights.choice import Transport, choose
from composer_mesh.planning.mesh_layout import host_count

FOLDER = "weights"


@contextmanager
def settled(
    config: Config, root: Path, hosts: int | None = None
) -> Iterator[tuple[Config, Transport]]:
    """A run's config with its transport named, and why it is this one; `root` is its directory.

    `hosts` are those that the run has, which its config may not say. Raises `TransportUnavailable`
    with the repair. What `disk` leaves goes with the block, and what it left when the run was
    killed, before.
    """
    transport = choose(config.weights, host_count(config) if hosts is None else hosts)
    folder = _folder(config, root)
    named = {"transport": transport.name, "folder": folder}
    weights = config.weights.model_copy(update=named)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield config.model_copy(update={"weights": weights}), transport
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(config: Config, root: Path) -> Path:
    """A folder of the run's own, also where several runs are given the same one."""
    given = config.weights.folder
    return root.absolute() / FOLDER if given is None else given.absolute() / root.absolute().name
