"""Turns operations into a trainer's calls."""

from __future__ import annotations

from typing import Any

from composer_mesh.plugins.tinker.models.messages import AdamParams, TrainCall
from composer_mesh.plugins.tinker.server.operations import Kind


def call_of(
    kind: Kind, model: str, payload: Any, position: int, path: str = "", optimizer: bool = False
) -> TrainCall:
    """Return the call for an operation; `path` is the file that it reads or writes."""
    if kind == "forward" or kind == "forward_backward":
        options, data = payload.options, payload.data
        return TrainCall(model, position, kind, data, payload.loss, options)
    if kind == "optim_step":
        adam = AdamParams(**payload.adam_params.model_dump())
        return TrainCall(model, position, "optim_step", adam=adam)
    if kind == "load_weights":
        return TrainCall(model, position, "load_weights", path=path, optimizer=optimizer)
    return TrainCall(model, position, "save", path=path, optimizer=kind == "save_weights")
