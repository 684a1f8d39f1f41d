"""The replicas of a service over time: they start, are set up, die, drain and stop.

`replicas` decides which one takes a call, `restarts` when a dead one is replaced. All replicas join
through `Membership._come`: the process starts, is brought to the state of the others (by the set-up
calls that they received, or by the service's own `catch_up`), and only then gets calls.

The set-up calls are the last per endpoint. A call that reads another actor's memory is stale once
that actor is gone: a replica that starts then waits for a newer one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from composer_mesh.mesh.failures import cause_of, states_its_cause
from composer_mesh.mesh.spawned import working_together
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, together
from composer_mesh.services.pool.dispatch import Dispatch, NoReplicaLeft, gone
from composer_mesh.services.pool.replicas import (
    Call,
    Replica,
    ReplicaSpec,
    ReplicaState,
    Router,
    to_retire,
)
from composer_mesh.services.pool.restarts import RestartManager

LOAD = "load"
"""The set-up call that is slow and stays valid."""
TELL_S = 3.0
"""Longest time until an actor's death is known after a read of its memory has failed.

Such a read may fail immediately, and on a busy machine the notice of a process's end may be later.
"""


class Setups:
    """The set-up calls, in the order in which they were last made."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._remembered = asyncio.Event()

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._calls

    def remember(self, call: Call) -> None:
        """Store a call in place of the last one of its endpoint."""
        self._calls.pop(call.endpoint, None)
        self._calls[call.endpoint] = call
        self._remembered.set()

    def loads(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica can receive while others are set up: they stay valid."""
        first = takewhile(lambda call: call.endpoint == LOAD, self._calls.values())
        return [call for call in first if replica.received.get(LOAD) is not call]

    def unsent_calls(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica has not received yet."""
        return [
            call for call in self._calls.values() if replica.received.get(call.endpoint) is not call
        ]

    async def readable(self, deadline_s: float) -> None:
        """Wait until no call is stale; after `deadline_s` raise the death of its source."""
        try:
            async with asyncio.timeout(deadline_s):
                while any(call.stale for call in self._calls.values()):
                    self._remembered.clear()
                    await self._remembered.wait()
        except TimeoutError:
            raise self._end_of_source() from None

    def _end_of_source(self) -> ActorDied:
        sources = (call.source for call in self._calls.values() if call.stale)
        name = next((source.name for source in sources if source), "its source")
        return ActorDied(name, "nothing took the place of what it had published")


async def source_ended(call: Call) -> ActorDied | None:
    """Return the death of the actor that a failed call read from, if it explains the failure."""
    if call.source is None or call.source.death is None:
        return None
    await asyncio.wait([call.source.death], timeout=TELL_S)
    return ActorDied(*call.source.death.result().args) if call.stale else None


class Membership:
    """The replicas of one service.

    `members` should serve; dead ones stay until another serves in their slot or a resize removes
    them. `coming` are being set up and `leaving` drain.
    """

    def __init__(self, spec: ReplicaSpec, router: Router) -> None:
        self.dispatch = Dispatch(spec.name, router, self.lose)
        self.router = router
        self.members: list[Replica] = []
        self.coming: list[Replica] = []
        self.leaving: list[Replica] = []
        self.reasons: dict[str, str] = {}
        """Why replicas that are gone are gone, by name."""
        self._spec = spec
        self._generations: Counter[int] = Counter()
        """How many processes each slot has had."""
        self._setups = Setups()
        self._healer: RestartManager | None = None
        if spec.restart is not None:
            self._healer = RestartManager(spec, spec.restart, self._come_instead, self._give_up)
        self._setting_up, self._resizing = asyncio.Lock(), asyncio.Lock()
        self._last_death = ActorDied(spec.name, "it has no replica yet")
        self._drains: dict[Replica, asyncio.Task[None]] = {}
        self._growth: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks(spec.task_failed)
        self._burials: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def all_replicas(self) -> list[Replica]:
        """Every replica that has, or will have, a process."""
        return [*self.members, *self.coming, *self.leaving]

    @property
    def restarts(self) -> int:
        """Number of replicas that have replaced dead ones."""
        return 0 if self._healer is None else self._healer.restarts

    def last_death(self) -> NoReplicaLeft:
        """Return the error with the reason why no replica is left."""
        return NoReplicaLeft(*self._last_death.args)

    async def fanout(self, call: Call, deadline_s: float) -> list[Any]:
        """Call every member, bypassing the queue. Waits for all answers, in the members' order.

        If the service handles deaths itself, members that die are skipped.
        """
        answers = _answers(await self._ask(call, deadline_s))
        if not answers:
            raise self.last_death()
        return answers

    async def set_up(self, call: Call, deadline_s: float) -> list[Any]:
        """Run a fanout that each later replica also receives before it gets calls.

        The last call of each endpoint is stored, in the order in which they were made. Where
        replicas are replaced, one that fails at an endpoint that was set up before, or at reading
        another actor's memory, is replaced; the list is empty where all of them are being replaced.
        """
        async with self._setting_up:
            found = await self._ask(call, deadline_s)
            known = call.source is not None or call.endpoint in self._setups
            if self._healer is not None and known:
                found = await self._without_failed(call, found)
            answers = _answers(found)
            if not answers and (self._healer is None or not self.router.may_find_target):
                raise self.last_death()
            self.remember(call)
        return answers

    def remember(self, call: Call) -> None:
        """Store a call that each later replica receives before it gets others."""
        self._setups.remember(call)

    async def resize(self, count: int, drain_s: float, deadline_s: float) -> None:
        """Resize to `count` replicas that are alive or whose replacements are under way.

        Waits until new ones serve and old ones are gone.
        """
        async with self._resizing:
            self.dispatch.check_open()
            gone_for_good = [one for one in self.members if one.ended and not self._heals(one)]
            self._take_away(gone_for_good, drain_s)
            if (missing := count - len(self.members)) > 0:
                await self._growing(missing, deadline_s)
            self._take_away(to_retire(self.members, max(0, -missing)), drain_s)
            await self._left()

    async def grow(self, count: int, deadline_s: float) -> None:
        """Start replicas, set them up and let them serve; if one fails, all of them are stopped."""
        newcomers = self._newcomers(count)
        self.router.coming += count
        try:
            await self._come(newcomers, deadline_s)
        finally:
            self.router.coming -= count
            self.dispatch.changed()

    def lose(self, replica: Replica, reason: str) -> None:
        """Record a replica's death once; reroute its calls and stop the rest of its process."""
        if not replica.serving:
            return
        replica.state, replica.reason = ReplicaState.DEAD, reason
        self._last_death = gone(replica)
        if replica.actor is not None:
            self._spec.host.lost(replica.actor, reason)
        burial = self._tasks.start(f"stopping {replica.name}", self._spec.stop(replica))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)
        if self._healer is not None and self._closing is None and replica in self.members:
            self.router.coming += 1
            self._healer.begin(replica, burial).add_done_callback(self._healed)
        self._depart(replica)

    def replacement(self, slot: int) -> asyncio.Task[None] | None:
        """Return the task that replaces a slot's dead member; None if it serves or is given up.

        The task ends when the slot is served again or given up, without an error.
        """
        for replica in (one for one in self.members if one.slot == slot):
            death = None if replica.actor is None else replica.actor.death
            if death is not None and death.done():
                self._on_death(replica, death)  # its callback may not have run yet
            return None if self._healer is None else self._healer.under_way(replica)
        return None

    async def close(self, drain_s: float) -> None:
        """Refuse calls, give those in flight `drain_s`, stop every process. Waits for its end."""
        if self._closing is None:
            self.dispatch.close()
            self._closing = self._tasks.start(f"closing {self._spec.name}", self._close(drain_s))
        await asyncio.shield(self._closing)

    @property
    def _forgives(self) -> bool:
        return self._spec.policy is FaultPolicy.OWNER

    def _newcomers(self, count: int) -> list[Replica]:
        first = len(self.coming)
        for _ in range(count):
            taken = {one.slot for one in self.all_replicas}
            lowest_free = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self.coming.append(self._next_in(lowest_free))
        return self.coming[first:]

    def _next_in(self, slot: int) -> Replica:
        """Return the next replica for a slot: `echo-1`, then `echo-1.2` for its next process.

        Where replicas are not numbered, the first slot is called `echo`; where names are stable,
        the next process in a slot has the slot's name again.
        """
        self._generations[slot] += 1
        generation, spec = self._generations[slot], self._spec
        name = f"{spec.name}-{slot}" if slot or spec.numbered else spec.name
        name += f".{generation}" if generation > 1 and not spec.stable_names else ""
        return Replica(name, ReplicaState.STARTING, slot=slot, generation=generation)

    async def _ask(self, call: Call, deadline_s: float) -> dict[Replica, Any]:
        """Return each member's answer or exception, except of members whose death is tolerated."""
        self.dispatch.check_open()
        receivers = [one for one in self.members if one.serving or not self._forgives]
        calls = (self.dispatch.direct(one, call, deadline_s) for one in receivers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            replica: answer
            for replica, answer in zip(receivers, answers, strict=True)
            if not (self._forgives and isinstance(answer, ActorDied) and replica.ended)
        }

    async def _without_failed(self, call: Call, found: dict[Replica, Any]) -> dict[Replica, Any]:
        """Drop the replicas that failed, unless the actor that they read from has died."""
        failed = {
            one: error
            for one, error in found.items()
            if isinstance(error, Exception) and not states_its_cause(error)
        }
        if failed and (died := await source_ended(call)):
            raise died
        for replica, error in failed.items():
            self.lose(replica, f"its {call.endpoint} failed: {cause_of(error)}")
        return {one: answer for one, answer in found.items() if one not in failed}

    async def _come(self, newcomers: Sequence[Replica], deadline_s: float) -> None:
        """Add new replicas; only quick calls run under the lock that blocks other set-ups.

        Only their own progress counts, whichever call started this.
        """
        try:
            with working_together(list):
                await together(*(self._start(one, deadline_s) for one in newcomers))
                await self._setups.readable(deadline_s)
                async with self._setting_up:
                    await together(*(self._catch_up(one, deadline_s) for one in newcomers))
                    self._admit(newcomers)
        except BaseException:
            await asyncio.gather(*(self._stop(one, "it never served") for one in newcomers))
            raise
        finally:
            self.coming = [one for one in self.coming if one not in newcomers]

    async def _start(self, replica: Replica, deadline_s: float) -> None:
        await self._spec.start(replica)
        await self._tell(replica, self._setups.loads(replica), deadline_s)

    async def _catch_up(self, replica: Replica, deadline_s: float) -> None:
        """Bring a replica to the state of the others, by the service's own way if it has one."""
        calls = self._setups.unsent_calls(replica)
        if self._spec.catch_up is None:
            await self._tell(replica, calls, deadline_s)
        else:
            replica.caught_up = await self._spec.catch_up(replica, calls)

    async def _tell(self, replica: Replica, calls: Sequence[Call], deadline_s: float) -> None:
        for call in calls:
            await self.dispatch.direct(replica, call, deadline_s)
            replica.received[call.endpoint] = call

    async def _come_instead(self, dead: Replica) -> Replica:
        newcomer = self._next_in(dead.slot)
        self.coming.append(newcomer)
        await self._come([newcomer], self._spec.deadline_s)
        return newcomer

    def _give_up(self, died: ActorDied) -> None:
        self._last_death = died

    def _healed(self, _: asyncio.Task[None]) -> None:
        self.router.coming -= 1
        self.dispatch.changed()

    def _heals(self, replica: Replica) -> bool:
        return self._healer is not None and self._healer.under_way(replica) is not None

    def _admit(self, newcomers: Sequence[Replica]) -> None:
        self.dispatch.check_open()
        for replica in newcomers:
            replica.state = ReplicaState.READY
            if replica.actor is not None and replica.actor.death is not None:
                died = partial(self._on_death, replica)
                replica.actor.death.add_done_callback(died)
        self.router.targets += newcomers
        slots = {one.slot for one in newcomers}
        stay = [one for one in self.members if one.slot not in slots]
        self.members = sorted([*stay, *newcomers], key=lambda one: one.slot)

    def _on_death(self, replica: Replica, death: asyncio.Future[ActorDied]) -> None:
        if not death.cancelled():
            self.lose(replica, death.result().reason)

    async def _growing(self, count: int, deadline_s: float) -> None:
        self._growth = asyncio.create_task(self.grow(count, deadline_s))  # awaited here
        try:
            await self._growth
        except asyncio.CancelledError:
            if self._growth.cancelled() and self._closing is not None:
                self.dispatch.check_open()
            raise
        finally:
            self._growth = None

    def _take_away(self, replicas: Sequence[Replica], drain_s: float) -> None:
        """Remove replicas: each drains in a background task, whether or not it is awaited."""
        for replica in replicas:
            self.members.remove(replica)
            self.leaving.append(replica)
            if self._healer is not None:
                self._healer.stop(replica)
            if replica.serving:
                replica.state = ReplicaState.DRAINING
            drain = self._drain(replica, drain_s)
            self._drains[replica] = self._tasks.start(f"draining {replica.name}", drain)
        self.dispatch.changed()

    async def _left(self) -> None:
        """Wait until no replica is leaving; they keep draining if this is cancelled."""
        if drains := list(self._drains.values()):
            await asyncio.wait(drains)
            self.dispatch.check_open()
            await asyncio.gather(*drains)

    async def _drain(self, replica: Replica, drain_s: float) -> None:
        try:
            await replica.drained(drain_s)
            await self._stop(replica, "a resize took it away")
            self.leaving.remove(replica)
        finally:
            del self._drains[replica]

    async def _stop(self, replica: Replica, reason: str) -> None:
        if not replica.ended:
            replica.state, replica.reason = ReplicaState.STOPPED, reason
            self._depart(replica)
        await cancel_and_wait(replica.under_way)
        await self._spec.stop(replica)

    def _depart(self, replica: Replica) -> None:
        self.reasons[replica.name] = replica.reason
        self.router.targets = [target for target in self.router.targets if target is not replica]
        replica.stirred.set()
        self.dispatch.changed()

    async def _close(self, drain_s: float) -> None:
        await cancel_and_wait([*self._drains.values(), *filter(None, [self._growth])])
        if self._healer is not None:
            await self._healer.close()
        await asyncio.gather(*(one.drained(drain_s, sessions=False) for one in self.all_replicas))
        stops: list[Coroutine[Any, Any, None]] = [
            self._stop(one, "the service was closed") for one in self.all_replicas
        ]
        await asyncio.gather(*stops, *self._burials)


def _answers(found: dict[Replica, Any]) -> list[Any]:
    """Return the answers in the members' order; raises the first error among them."""
    for answer in found.values():
        if isinstance(answer, BaseException):
            raise answer
    return list(found.values())
