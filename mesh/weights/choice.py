"""Selects the weight transport: as configured, within the capabilities of this machine.

The same config gives the same answer in every process of a run. `transports` and
`remote_transports` move the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from composer_mesh.configs.schema import Config
from composer_mesh.configs.weights import WeightsConfig, WeightTransport
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.mesh.weights.remote_transports import (
    RdmaReceiver,
    RdmaSender,
    TorchstoreReceiver,
    TorchstoreSender,
    require_torchstore,
)
from composer_mesh.mesh.weights.transports import (
    ELSEWHERE,
    DiskReceiver,
    DiskSender,
    PartShape,
    ShmReceiver,
    ShmSender,
    TransportReceiver,
    TransportSender,
    why_no_shm,
)
from composer_mesh.planning.mesh_layout import weight_transport


@dataclass(frozen=True)
class Transport:
    """A weight transport, why it was chosen, and the folder of `disk`."""

    name: WeightTransport
    reason: str = "requested"
    folder: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose(config: WeightsConfig, hosts: int = 1) -> Transport:
    """Return the transport of a run on `hosts` hosts; raises `TransportUnavailable`."""
    name, reason = weight_transport(config, hosts)
    lacks = why_no_shm()
    if config.transport == "auto" and name == "shm" and lacks is not None:
        name, reason = "rdma", lacks
    if name == "shm" and hosts > 1:
        raise TransportUnavailable("shm", f"the run has {hosts} hosts", ELSEWHERE)
    if name == "shm" and lacks is not None:
        raise TransportUnavailable("shm", lacks, ELSEWHERE)
    if name == "torchstore":
        require_torchstore()
    return Transport(name, reason, config.folder)


def published_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype that floating weights are published in; None keeps the trainer's dtypes.

    Half precision if every receiver keeps it: SDPO teachers that pull weights may need full ones.
    """
    return torch.bfloat16 if config.publishes_half else None


def open_sender(transport: Transport, shape: PartShape) -> TransportSender:
    """Open the publisher's side of a transport."""
    nbytes = shape.layout.nbytes
    match transport.name:
        case "shm":
            return ShmSender(nbytes)
        case "rdma":
            return RdmaSender(nbytes)
        case "torchstore":
            return TorchstoreSender(nbytes)
        case "disk":
            return DiskSender(shape, transport.folder)


def open_receiver(name: WeightTransport) -> TransportReceiver:
    """Open the receiver's side of a transport."""
    return RECEIVERS[name]()


RECEIVERS: dict[WeightTransport, Callable[[], TransportReceiver]] = {
    "shm": ShmReceiver,
    "rdma": RdmaReceiver,
    "torchstore": TorchstoreReceiver,
    "disk": DiskReceiver,
}
