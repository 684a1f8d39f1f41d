"""Ranks of a trainer that answer at once, and a host that starts them, for `TrainerRanks`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.manifest import WrittenFile, written
from composer_mesh.actors.models.ranks import Address
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, HostLost

MEETING = Address("10.0.0.5", 4711)


class FakeRank:
    """Loads as version 3 from a checkpoint and as version 0 without one.

    An endpoint in `errors` raises once, and one in `hangs` never answers.
    """

    def __init__(self, name: str) -> None:
        self.name, self.heard = name, list[tuple[Any, ...]]()
        self.draft = Path()
        self.errors, self.hangs = dict[str, Exception](), set[str]()
        self.death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()

    async def call(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        self.heard.append((endpoint, *args))
        if endpoint in self.hangs:
            await asyncio.Event().wait()
        if endpoint in self.errors:
            raise self.errors.pop(endpoint)
        if endpoint == "open_rendezvous":
            return MEETING
        if endpoint == "save":
            self.draft = args[0]
        if endpoint == "saved":
            return self._saved()
        return 3 if endpoint == "load" and args[-1] else 0

    def _saved(self) -> list[WrittenFile]:
        file = self.draft / f"{self.name}.state"
        file.write_text(self.name)
        return written(self.draft, [file])

    def die(self) -> None:
        self.death.set_result(ActorDied(self.name, "killed"))


class FakeHost:
    """Starts fakes, but none of the names in `refused`, and none on a host that is `lost_host`."""

    def __init__(self) -> None:
        self.capacity_wait_s = 60.0
        self.actors: list[FakeRank] = []
        self.refused: set[str] = set()
        self.lost_host = ""
        self.told: list[dict[str, Any]] = []
        self.notes: list[tuple[str, ...]] = []
        self.supervisor = self

    def note(self, *event: str) -> None:
        self.notes.append(event)

    async def spawn(
        self, name: str, _kind: Any, *, env: Any, policy: FaultPolicy, on: str | None = None
    ) -> FakeRank:
        assert policy is FaultPolicy.OWNER
        self.told.append({"on": on, **env})
        if on == self.lost_host:
            raise HostLost(on, "it gave no sign of life for 21 s")
        assert name not in [actor.name for actor in self.actors]
        if name in self.refused:
            raise ActorDied(name, "no memory")
        self.actors.append(rank := FakeRank(name))
        return rank

    async def stop(self, rank: FakeRank) -> None:
        self.actors.remove(rank)

    def lost(self, rank: FakeRank, _reason: str) -> None:
        if not rank.death.done():
            rank.die()

    def named(self, name: str) -> FakeRank:
        return next(actor for actor in self.actors if actor.name == name)
