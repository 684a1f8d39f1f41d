"""Which models the trainer holds: opens them, repeats what their files lack, and saves them.

The files of a server's folder:

    models/000007/000000120.safetensors     the state of model 7 at position 120
    saved/000000345.safetensors             weights that operation 345 saved

`target_of` says where an operation reads or writes weights, and the record of what it saves.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from composer_mesh.plugins.tinker.models.messages import TrainCall
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import TrainBackend
from composer_mesh.plugins.tinker.server.records import (
    Model,
    Operation,
    SamplerSource,
    Saved,
    SavedKind,
    saved_path,
)
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.requests import call_of, payload_of
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.services.web.errors import bad

REPEATED_AT_ONCE = 16


class StateLost(RuntimeError):
    """A model whose state cannot be rebuilt: its id, and why."""

    def __str__(self) -> str:
        return f"the state of {self.args[0]} cannot be rebuilt: {self.args[1]}"


class ModelStore:
    """The models that a trainer holds, those used last."""

    def __init__(self, server: TrainingServer, backend: TrainBackend) -> None:
        self._served, self._folder, self._backend = server.served, server.folder, backend
        self._registry, self._commits = server.registry, server.commits
        self._open: OrderedDict[str, None] = OrderedDict()
        self.kept: dict[str, int] = {}
        """Bytes of the bodies that the log keeps of each model since its last written state."""
        self.repeated = 0
        """Number of operations that were repeated from the log so far."""

    def keep(self, operation: Operation) -> None:
        """Count the body of an operation that a repetition may need."""
        self.kept[operation.model] = self.kept.get(operation.model, 0) + operation.size

    def lost(self) -> None:
        """Note that the trainer was lost with all it held."""
        self._open.clear()

    async def need(self, models: Collection[str]) -> None:
        """Let the trainer hold these models, in place of those used longest ago.

        Raises `StateLost`, and `BackendLost` where the trainer dies meanwhile.
        """
        missing = [one for one in models if one not in self._open]
        idle = [one for one in self._open if one not in models]
        excess = max(0, len(self._open) + len(missing) - self._served.limits.models_in_memory)
        await self._put_away(idle[:excess])
        for model in missing:
            await self._take_in(self._registry.models[model])
        for model in models:
            self._open.move_to_end(model)

    async def _put_away(self, models: Sequence[str]) -> None:
        for model in models:
            held = self._registry.models.get(model)
            if held and held.position > held.saved_position and not held.unloaded:
                await self.save(model)
        if models:
            await self._backend.close(models)
            for model in models:
                del self._open[model]

    async def _take_in(self, model: Model) -> None:
        file = self._folder / model.file if model.file else None
        position = await self._backend.open(model.id, model.spec, file)
        changes = await self._commits.run(
            partial(log.changes_after, model=model.id, position=position)
        )
        for first in range(0, len(changes), REPEATED_AT_ONCE):
            part = changes[first : first + REPEATED_AT_ONCE]
            position = await self._repeat(model, part, position)
        if position != model.position:
            raise StateLost(model.id, f"it is at {position} and not at {model.position}")
        self._open[model.id] = None

    async def _repeat(self, model: Model, changes: Sequence[log.Stored], position: int) -> int:
        calls = []
        for number, change in enumerate(changes, start=position):
            if change.position != number or not change.request.body:
                raise StateLost(model.id, f"the log lacks the change at position {number}")
            calls.append(await asyncio.to_thread(self._call, change, number))
        results = await self._backend.execute(calls)
        self.repeated += len(calls)
        for result in results:
            if result.error:
                raise StateLost(model.id, f"a repeated operation failed: {result.error}")
        return position + len(changes)

    def _call(self, change: log.Stored, position: int) -> TrainCall:
        request = change.request
        payload = payload_of(request.kind, request.body, self._served.data)
        if request.kind == "load_weights":
            raise StateLost(request.model, "its file is older than the weights that it loaded")
        call = call_of(request.kind, request.model, payload, position)
        return replace(call, shape=change.shape)

    async def save(self, model: str) -> None:
        """Write a model's state; on return the log says so, and its former file is gone."""
        held = self._registry.models[model]
        saved = await self.write(held)
        await self._commits.run(partial(log.put, one=saved))
        if not self._served.limits.keep_operations:
            before = saved.saved_position
            await self._commits.repeat(partial(log.drop_bodies, model=model, before=before))
        self._registry.set_model(saved)
        self.kept.pop(model, None)
        if held.file and held.file != saved.file:
            await asyncio.to_thread((self._folder / held.file).unlink, missing_ok=True)

    async def write(self, held: Model) -> Model:
        """Write a model's state as it is now; return its record with the new file."""
        file = f"models/{held.number:06d}/{held.position:09d}.safetensors"
        await self._backend.save(held.id, self._folder / file)
        return replace(held, file=file, saved_position=held.position, saved_steps=held.steps)


@dataclass(frozen=True)
class OperationTarget:
    """The file of an operation, relative to the server's folder, and what it makes."""

    file: str = ""
    optimizer: bool = False
    made: Saved | SamplerSource | None = None


def target_of(operation: Operation, registry: Registry) -> OperationTarget:
    """Return what an operation reads or writes; raises `Refused`."""
    kind, payload = operation.request.kind, operation.payload
    if kind == "load_weights":
        found = registry.saved(operation.request.client, payload.path)
        if payload.optimizer and found.kind == "sampler":
            raise bad(f"{found.path} has no optimizer state: load it without, or one of save_state")
        return OperationTarget(found.file, payload.optimizer)
    if kind not in ("save_weights", "save_weights_for_sampler"):
        return OperationTarget()
    model = registry.models[operation.model]
    file = f"saved/{operation.number:09d}.safetensors"
    if kind == "save_weights":
        name = payload.path or f"state-{operation.number:09d}"
        return OperationTarget(
            file, True, _saved(model, "training", name, file, operation, registry)
        )
    if payload.path is None and payload.sampling_session_seq_id is not None:
        name = f"{model.session}:sample:{payload.sampling_session_seq_id}"
        inflight = payload.kind == "inflight"
        sampler = SamplerSource(name, model.session, model.client, "", file, model.id, inflight)
        return OperationTarget(file, made=sampler)
    name = payload.path or f"sampler-{operation.number:09d}"
    return OperationTarget(file, made=_saved(model, "sampler", name, file, operation, registry))


def _saved(
    model: Model,
    kind: SavedKind,
    name: str,
    file: str,
    operation: Operation,
    registry: Registry,
) -> Saved:
    path, payload = saved_path(model.id, kind, name), operation.payload
    if path in registry.weights and not payload.overwrite:
        raise bad(f"{path} exists: choose another name, or send overwrite")
    registry.check_saved(model.client)
    ttl, now = payload.ttl_seconds, operation.waited_since
    metadata = json.dumps(payload.user_metadata) if payload.user_metadata else ""
    expires = None if ttl is None else now + ttl
    return Saved(path, model.client, model.id, kind, file, 0, now, metadata, model.spec, expires)
