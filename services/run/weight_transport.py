"""The weight transport of a run: chosen once at its start, the same for every actor."""

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
    """Yield the config with its transport named, and the choice; `root` is the run directory.

    `hosts` is the run's host count if the config does not give it. Raises `TransportUnavailable`
    with the repair. `disk` has a folder owned by the run while the block runs.
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
