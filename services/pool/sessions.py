"""Sessions: related calls that all go to one replica.

The actor implements the session's state in the replica.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.supervision import ActorDied, MeshError, SessionLost
from composer_mesh.services.pool.dispatch import CallRules, Endpoints, Route, gone
from composer_mesh.services.pool.membership import Membership
from composer_mesh.services.pool.replicas import Call, Replica


class PoolSession(Endpoints, Route):
    """The endpoints of the one replica that a session is bound to, from `open` to `close`.

    A session whose replica is lost raises `SessionLost` on every call from then on. A movable one,
    whose state is not in the replica or can be rebuilt, continues on another replica. One that is
    opened while all replicas are being replaced is bound to the one that takes its first call.
    """

    def __init__(
        self,
        name: str,
        actor_class: type[MeshActor],
        replicas: Membership,
        rules: CallRules,
        movable: bool,
        names: set[str],
    ) -> None:
        super().__init__(actor_class)
        self.name = name
        self.movable = movable
        self.moves = 0
        self._replicas, self._names = replicas, names
        self._rules = replace(rules, retry_timeouts=False, retry_errors=False)
        self._home: Replica | None = None
        self._opened = False

    @property
    def replica(self) -> str | None:
        """The name of the replica that the session is bound to, None if there is none yet."""
        return None if self._home is None else self._home.name

    def open(self) -> None:
        """Bind to the replica with the fewest sessions. Never blocks."""
        if self.name in self._names:
            raise ValueError(f"a session {self.name!r} is open already: choose another name")
        self._replicas.dispatch.check_open()
        self._settle(self._found())
        self._names.add(self.name)
        self._opened = True

    def close(self) -> None:
        """Release the replica. The actor's state of the session has to be deleted by a call."""
        if self._opened:
            self._names.discard(self.name)
            self._opened = False
            self._leave()

    async def __aenter__(self) -> PoolSession:
        self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the session's replica. Waits for its turn there and the answer."""
        self.check(endpoint)
        call = Call(endpoint, args, kwargs)
        return await self._replicas.dispatch.call(call, self._rules, self)

    def pin(self) -> Replica | None:
        """Return the replica for the next call, None while waiting for one; raise if it is lost."""
        if not self._opened:
            raise RuntimeError(
                f"session {self.name!r} is not open: call inside of `async with` or after open()"
            )
        if self._home is None or (self.movable and not self._home.open):
            home = self._found()
            self.moves += self._home is not None
            self._leave()
            self._settle(home)
        elif not self._home.serving:
            raise self.lost(gone(self._home), in_call=False)
        return self._home

    def takes(self, replica: Replica) -> bool:
        """Bind to the first replica that takes a call, if unbound; return whether it is its own."""
        if self._opened and self._home is None:
            self._settle(replica)
        return replica is self._home

    def lost(self, died: ActorDied, in_call: bool = True) -> MeshError:
        """Return the error for the caller when the replica was lost, by default under its call."""
        return died if self.movable else SessionLost(self.name, died.actor, died.reason, in_call)

    def _found(self) -> Replica | None:
        """Return a replica for the session; None while all are being replaced."""
        home = self._replicas.router.for_session()
        if home is None and not self._replicas.router.may_find_target:
            raise self._replicas.last_death()
        return home

    def _settle(self, home: Replica | None) -> None:
        self._home = home
        if home is not None:
            home.sessions += 1
            home.tied += not self.movable

    def _leave(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            home.sessions -= 1
            home.tied -= not self.movable
            home.stirred.set()
