"""Transport of weights from the trainer to generators and teachers.

The mesh detects a machine's capabilities at start.
"""

from typing import Literal

from composer_mesh.configs.base import FilePath, Section

WeightTransport = Literal["shm", "rdma", "torchstore", "disk"]


class WeightsConfig(Section):
    """How each version of the weights is transferred."""

    transport: Literal["auto", "shm", "rdma", "torchstore", "disk"] = "auto"
    """Transport of weights. "auto": "shm" if trainer and receivers share one host, else "rdma";
    "torchstore": needs an extra; "disk": needs only a shared file system."""

    checksums: bool = False
    """Whether receivers verify each version's bytes against the publisher's checksums."""

    folder: FilePath | None = None
    """Folder for the files of "disk", the same on every host; the run's directory by default."""
