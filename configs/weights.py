"""Weights on their way from the trainer to those who serve them.

Which transports a machine is capable of is found at start, by the mesh.
"""

from typing import Literal

from composer_mesh.configs.base import Section

WeightTransport = Literal["shm", "rdma", "torchstore", "disk"]


class WeightsConfig(Section):
    """How a version of the weights travels."""

    transport: Literal["auto", "shm", "rdma", "torchstore", "disk"] = "auto"
    """What carries weights: "auto" takes the fastest one that the run's hosts are capable of."""

    checksums: bool = False
    """Whether receivers prove each version's bytes against the publisher's checksums."""
