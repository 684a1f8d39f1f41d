"""How the weights of a run travel: chosen once, at its start, and then the same for every actor.

What a transport does is `mesh.weights`; what it is chosen by, too.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.weights.choice import Transport, choose
from composer_mesh.planning.mesh_layout import host_count
from composer_mesh.services.run.weights_folder import weights_folder


@asynccontextmanager
async def settled(
    config: Config, root: Path, record: Recorder, hosts: int | None = None
) -> AsyncIterator[tuple[Config, Transport]]:
    """A run's config with its transport named, and why it is this one; `root` is its directory.

    `hosts` are those that the run has, which its config may not say. Raises `TransportUnavailable`
    with the repair. `disk` has a folder of the run's own while the block runs.
    """
    transport = choose(config.weights, host_count(config) if hosts is None else hosts)
    if transport.name != "disk":
        yield _named(config, transport, config.weights.folder), transport
        return
    async with weights_folder(root, config.weights.folder, record) as folder:
        yield _named(config, transport, folder), transport


def _named(config: Config, transport: Transport, folder: Path | None) -> Config:
    named = {"transport": transport.name, "folder": folder}
    return config.model_copy(update={"weights": config.weights.model_copy(update=named)})
