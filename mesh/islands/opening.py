"""The island of a config: over an object store, or by torchft's lighthouse."""

from importlib.util import find_spec

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.mesh.islands.island import Island, IslandPort, Weights
from composer_mesh.mesh.object_store.port import StoreUnfit


class TorchftMissing(StoreUnfit):
    """islands.lighthouse is set, but torchft is not installed."""

    def __str__(self) -> str:
        return (
            "islands.lighthouse needs the package torchft, which is not installed: pip install "
            "'composer-mesh[torchft]', or give islands.store"
        )


def check_torchft(config: IslandsConfig) -> None:
    """Raise `TorchftMissing` for islands that need it; imports nothing."""
    if config.lighthouse is not None and find_spec("torchft") is None:
        raise TorchftMissing()


def open_island(config: IslandsConfig, steps: int, weights: Weights) -> IslandPort:
    """Return the island of a run with `steps` optimizer steps.

    Raises `StoreUnfit` for an address that cannot be used, or a package that is missing.
    """
    if config.lighthouse is None:
        return Island(config, steps, weights)
    check_torchft(config)
    from composer_mesh.mesh.islands.managed_island import ManagedIsland

    return ManagedIsland(config, steps, weights)
