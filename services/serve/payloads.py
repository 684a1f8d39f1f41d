"""Reads the bodies of operations, when they are accepted and again from the log."""

from __future__ import annotations

from typing import Any

from composer_mesh.services.serve import requests
from composer_mesh.services.serve.operations import Kind
from composer_mesh.services.serve.training_data import DataLimits, read_training_request

_JSON: dict[str, type[requests.ClientRequest]] = {
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveForSampler,
    "load_weights": requests.LoadWeights,
    "sample": requests.Sample,
}


def payload_of(kind: Kind, body: bytes, limits: DataLimits) -> Any:
    """Return the request in a body that was accepted; raises `Refused`."""
    if kind in ("forward", "forward_backward"):
        return read_training_request(body, limits)
    return requests.parsed(_JSON[kind], body)
