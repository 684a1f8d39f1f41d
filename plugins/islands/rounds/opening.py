"""The island of a config: over an object store, or by torchft's lighthouse."""

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.island import Island, IslandPort, Weights
from composer_mesh.plugins.islands.rounds.lighthouse import check_torchft


def open_island(config: IslandsConfig, steps: int, weights: Weights) -> IslandPort:
    """Return the island of a run with `steps` optimizer steps.

    Raises `StoreUnfit` for an address that cannot be used, or a package that is missing.
    """
    if config.lighthouse is None:
        return Island(config, steps, weights)
    check_torchft(config)
    from composer_mesh.plugins.islands.rounds.managed_island import ManagedIsland

    return ManagedIsland(config, steps, weights)
