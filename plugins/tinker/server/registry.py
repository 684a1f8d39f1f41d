"""The sessions, models, saved weights and samplers of clients, in memory and in the log.

Clients see only their own: what another has is unknown, as if it did not exist.
"""

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.records import (
    ClientSession,
    Model,
    Record,
    SamplerSource,
    Saved,
)
from composer_mesh.services.web.errors import TOO_MANY, RequestRefused, bad, unknown

TOUCH_S = 60.0
"""Seconds between two writes of a session's last use."""
REMEMBERED = 10
"""Models that are remembered, unloaded ones included, for each that a client may have."""
Known = TypeVar("Known", bound=Record)


class Registry:
    """Records by id; each change is on disk when its method returns."""

    def __init__(self, commits: GroupCommit, found: log.LoggedRecords, limits: ServeConfig) -> None:
        self._commits, self._limits = commits, limits
        self.sessions, self.models = dict(found.sessions), dict(found.models)
        self.weights, self.samplers = dict(found.saved), dict(found.samplers)
        self._started = time.time()
        """Nobody could use a session before."""
        self._next_number = 1 + max((one.number for one in self.models.values()), default=0)

    async def create_session(self, client: str) -> ClientSession:
        """Begin a session; raises `RequestRefused`, 429, at a limit."""
        limits = self._limits
        most = (limits.max_sessions_per_client, limits.max_sessions)
        self._check_count("sessions", client, self.sessions.values(), *most)
        now = time.time()
        session = ClientSession(str(uuid.uuid4()), client, now, now)
        await self._commits.run(partial(log.put, one=session))
        self.sessions[session.id] = session
        return session

    async def touch(self, client: str, session_id: str) -> None:
        """Note that a session is in use."""
        session, now = self.session(client, session_id), time.time()
        if now - session.used >= TOUCH_S:
            self.sessions[session_id] = session = replace(session, used=now)
            await self._commits.run(partial(log.put, one=session))

    def session(self, client: str, session_id: str) -> ClientSession:
        """Return a client's session."""
        return _own(self.sessions, "session", client, session_id)

    def new_model(
        self, client: str, session_id: str, seq: int, spec: ModelSpec, metadata: str
    ) -> Model:
        """Return a model that is not remembered yet, or the one with this number of the session."""
        session = self.session(client, session_id)
        model_id = f"{session.id}:train:{seq}"
        if model_id in self.models:
            return self.models[model_id]
        now, number = time.time(), self._next_number
        self._next_number += 1
        return Model(model_id, number, session.id, client, spec, metadata, now, now)

    def set_model(self, model: Model) -> None:
        """Remember a model as it is in the log; one that was unloaded stays so."""
        before = self.models.get(model.id)
        gone = model.unloaded or (before is not None and before.unloaded)
        self.models[model.id] = replace(model, unloaded=gone)

    def model(self, client: str, model_id: str) -> Model:
        """Return a client's model."""
        return _own(self.models, "model", client, model_id)

    def models_of(self, client: str) -> list[Model]:
        """Return the models of a client, the newest first."""
        own = [one for one in self.models.values() if one.client == client]
        return sorted(own, key=lambda one: -one.number)

    def saved(self, client: str, path: str) -> Saved:
        """Return weights that a client saved and that have not expired."""
        found = _own(self.weights, "saved weights", client, path)
        if self._is_over(found):
            raise unknown("saved weights", path)
        return found

    def all_saved(self, client: str, model_id: str | None = None) -> list[Saved]:
        """Return the weights that a client saved, the newest first."""
        own = (one for one in self.weights.values() if one.client == client)
        found = [one for one in own if model_id in (None, one.model) and not self._is_over(one)]
        return sorted(found, key=lambda one: -one.created)

    async def delete_saved(self, one: Saved) -> None:
        """Forget saved weights; samplers of them stay until they are used again."""
        await self._commits.run(partial(log.forget, kind=Saved, names=[one.path]))
        self.weights.pop(one.path, None)

    async def set_ttl(self, one: Saved, ttl_s: int | None) -> None:
        """Let saved weights expire so many seconds from now, or never."""
        kept = replace(one, expires=None if ttl_s is None else time.time() + ttl_s)
        await self._commits.run(partial(log.put, one=kept))
        self.weights[kept.path] = kept

    def expired(self) -> list[Saved]:
        """Return the saved weights whose time is over."""
        return [one for one in self.weights.values() if self._is_over(one)]

    async def create_sampler(self, sampler: SamplerSource) -> SamplerSource:
        """Enter a sampler; one with the same id must be of the same weights."""
        held = self.samplers.get(sampler.id)
        if held is not None and held != sampler:
            raise bad(f"sampling session {sampler.id!r} is of {held.path or 'the base model'!r}")
        if held is None:
            limits = self._limits
            most = (limits.max_samplers_per_client, limits.max_samplers)
            self._check_count("samplers", sampler.client, self.samplers.values(), *most)
            await self._commits.run(partial(log.put, one=sampler))
            self.samplers[sampler.id] = sampler
        return sampler

    def check_saved(self, client: str) -> None:
        """Raise `RequestRefused` where a client, or all, have saved as many weights as they may."""
        own = [one.bytes for one in self.weights.values() if one.client == client]
        total, limits = sum(one.bytes for one in self.weights.values()), self._limits
        if len(own) >= limits.max_saved_per_client:
            raise bad(
                f"you have {len(own)} saved weights, of at most {limits.max_saved_per_client}: "
                "delete some, or let them expire"
            )
        for whose, size, most in (
            ("your", sum(own), limits.max_saved_gb_per_client),
            ("all clients'", total, limits.max_saved_gb),
        ):
            if size >= most * 1e9:
                raise bad(
                    f"{whose} saved weights have {size / 1e9:.3g} GB, of at most {most:g}: delete "
                    "some, or let them expire"
                )

    def _check_count(
        self,
        what: str,
        client: str,
        held: Collection[ClientSession | SamplerSource],
        most_own: int,
        most: int,
    ) -> None:
        own = sum(one.client == client for one in held)
        if own >= most_own or len(held) >= most:
            raise RequestRefused(
                TOO_MANY,
                f"you have {own} {what} and all clients {len(held)}, of at most {most_own} and "
                f"{most}: finish sessions, or wait until unused ones are freed",
            )

    async def free_unused(self) -> list[Model]:
        """Forget what is not used any more; return the models, whose files are not needed.

        Models: unloaded ones without saved weights, `result_s` after their last use. Sessions and
        their samplers: `session_idle_s` after the last use; a session stays while it has a model.
        """
        now, named = time.time(), {one.model for one in self.weights.values()}
        gone = [
            one
            for one in self.models.values()
            if one.unloaded and one.id not in named and one.used < now - self._limits.result_s
        ]
        if gone:
            await self._commits.repeat(partial(log.delete_models, names=[one.id for one in gone]))
        for one in gone:
            self.models.pop(one.id, None)
        if (before := now - self._limits.session_idle_s) > self._started:
            await self.end([one.id for one in self.sessions.values() if one.used < before])
        return gone

    async def end(self, sessions: Collection[str]) -> None:
        """Free sessions and their samplers; one with models stays."""
        ended, with_models = set(sessions), {one.session for one in self.models.values()}
        samplers = [one for one in self.samplers.values() if one.session in ended]
        if samplers:
            await self.forget_samplers(samplers)
        free = sorted(ended - with_models)
        if free:
            await self._commits.repeat(partial(log.delete_sessions, names=free))
        for name in free:
            self.sessions.pop(name, None)

    def sampler(self, client: str, sampler_id: str) -> SamplerSource:
        """Return a client's sampler."""
        return _own(self.samplers, "sampling session", client, sampler_id)

    async def forget_samplers(self, gone: Sequence[SamplerSource]) -> None:
        """Forget samplers, which sample no more."""
        names = [one.id for one in gone]
        await self._commits.repeat(partial(log.delete_samplers, names=names))
        for name in names:
            self.samplers.pop(name, None)

    def outdated(self, kept: int) -> list[SamplerSource]:
        """Return the samplers without a name beyond the newest of each model."""
        by_model: dict[str, list[SamplerSource]] = {}
        for one in self.samplers.values():
            if one.file and not one.path:
                by_model.setdefault(one.model, []).append(one)
        return [one for own in by_model.values() for one in own[:-kept]]

    def files(self) -> set[str]:
        """Return the files of saved weights and of samplers without a name."""
        unnamed = {one.file for one in self.samplers.values() if not one.path}
        return unnamed | {one.file for one in self.weights.values()}

    def file_of(self, sampler: SamplerSource) -> str:
        """Return the file that a sampler draws from now: the newest of its model if `inflight`.

        Raises `RequestRefused` for weights that were deleted.
        """
        if sampler.path and sampler.path not in self.weights:
            raise unknown("saved weights", sampler.path)
        if not sampler.inflight:
            return sampler.file
        published = [
            one for one in self.samplers.values() if one.inflight and one.model == sampler.model
        ]
        return published[-1].file

    def _is_over(self, one: Saved) -> bool:
        return one.expires is not None and one.expires <= time.time()


def _own(records: Mapping[str, Known], kind: str, client: str, name: str) -> Known:
    """Return a client's record; raises `RequestRefused` for one that it does not have."""
    found = records.get(name)
    if found is None or found.client != client:
        raise unknown(kind, name)
    return found
