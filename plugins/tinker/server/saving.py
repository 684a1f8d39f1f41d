"""Where operations read and write weights, and the records of what they saved."""

from __future__ import annotations

import json
from dataclasses import dataclass

from composer_mesh.plugins.tinker.server.operations import Operation
from composer_mesh.plugins.tinker.server.records import Model, Sampler, Saved, SavedKind, saved_path
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.services.web.errors import bad


@dataclass(frozen=True)
class Target:
    """The file of an operation, relative to the server's folder, and what it makes."""

    file: str = ""
    optimizer: bool = False
    saved: Saved | None = None
    sampler: Sampler | None = None


def target_of(operation: Operation, registry: Registry) -> Target:
    """Return what an operation reads or writes; raises `Refused`."""
    kind, payload = operation.request.kind, operation.payload
    if kind == "load_weights":
        found = registry.saved(operation.request.client, payload.path)
        if payload.optimizer and found.kind == "sampler":
            raise bad(f"{found.path} has no optimizer state: load it without, or one of save_state")
        return Target(found.file, payload.optimizer)
    if kind not in ("save_weights", "save_weights_for_sampler"):
        return Target()
    model = registry.held(operation.model)
    file = f"saved/{operation.number:09d}.safetensors"
    if kind == "save_weights":
        name = payload.path or f"state-{operation.number:09d}"
        return Target(file, True, saved=_saved(model, "training", name, file, operation, registry))
    if payload.path is None and payload.sampling_session_seq_id is not None:
        name = f"{model.session}:sample:{payload.sampling_session_seq_id}"
        inflight = payload.kind == "inflight"
        sampler = Sampler(name, model.session, model.client, "", file, model.id, inflight)
        return Target(file, sampler=sampler)
    name = payload.path or f"sampler-{operation.number:09d}"
    return Target(file, saved=_saved(model, "sampler", name, file, operation, registry))


def _saved(
    model: Model,
    kind: SavedKind,
    name: str,
    file: str,
    operation: Operation,
    registry: Registry,
) -> Saved:
    path, payload = saved_path(model.id, kind, name), operation.payload
    if registry.has_saved(path) and not payload.overwrite:
        raise bad(f"{path} exists: choose another name, or send overwrite")
    registry.check_saved(model.client)
    ttl, now = payload.ttl_seconds, operation.waited_since
    metadata = json.dumps(payload.user_metadata) if payload.user_metadata else ""
    expires = None if ttl is None else now + ttl
    return Saved(path, model.client, model.id, kind, file, 0, now, metadata, model.spec, expires)
