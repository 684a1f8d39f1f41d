"""Bodies of operations, read when they are accepted and again from the log, and their train calls.

Of operations that wait, only small bodies stay in memory, up to a sum; the others are read from the
log when they are executed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.plugins.tinker.models.messages import AdamParams, TrainCall
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.records import Kind, Operation
from composer_mesh.plugins.tinker.server.training_data import DataLimits, read_training_request

_JSON: dict[str, type[requests.ClientRequest]] = {
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveForSampler,
    "load_weights": requests.LoadWeights,
    "sample": requests.SampleRequest,
}


LARGEST_HELD, MOST_HELD = 256 * 1024, 32 * 2**20
"""Bytes of one body, and of all bodies, that are held in memory while their operations wait."""


def payload_of(kind: Kind, body: bytes, limits: DataLimits) -> Any:
    """Return the request in a body that was accepted; raises `Refused`."""
    if kind in ("forward", "forward_backward"):
        return read_training_request(body, limits)
    return requests.parsed(_JSON[kind], body)


class Payloads:
    """The decoded bodies of the operations of one server."""

    def __init__(self, commits: GroupCommit, limits: DataLimits) -> None:
        self._commits, self._limits = commits, limits
        self.held = 0
        """Bytes of bodies that are held for operations that wait."""

    def hold(self, operation: Operation, payload: Any) -> None:
        """Keep the payload of an operation that begins to wait, where it may be in memory."""
        if operation.size <= min(LARGEST_HELD, MOST_HELD - self.held):
            operation.payload, operation.held = payload, operation.size
            self.held += operation.held

    def release(self, operation: Operation) -> None:
        """Free the payload of an operation that is answered."""
        self.held -= operation.held
        operation.payload, operation.held = None, 0

    async def read(self, operation: Operation) -> Any:
        """Return the payload of an operation; one from the log raises what is wrong with it."""
        if operation.payload is None:
            body = await self._commits.run(partial(log.body_of, number=operation.number))
            kind = operation.request.kind
            operation.payload = await asyncio.to_thread(payload_of, kind, body, self._limits)
        return operation.payload

    def executed(self, operation: Operation) -> None:
        """Drop the payload of an operation that was executed, unless it is held until then."""
        if not operation.held:
            operation.payload = None


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
