"""Weights on their way from the trainer to those who serve them.

What a machine is capable of is found at start, by the mesh.
"""

from typing import Literal

from composer_mesh.configs.base import FilePath, Section

WeightTransport = Literal["shm", "rdma", "torchstore", "disk"]


class WeightsConfig(Section):
    """How a version of the weights travels."""

    transport: Literal["auto", "shm", "rdma", "torchstore", "disk"] = "auto"
    """What carries weights: "auto" takes "shm" where trainer and receivers share one host, and
    "rdma" elsewhere; "torchstore" comes with an extra, "disk" needs only a shared file system."""

    checksums: bool = False
    """Whether receivers prove each version's bytes against the publisher's checksums."""

    folder: FilePath | None = None
    """Where "disk" puts its files, on every host the same; the run's directory by default."""
