"""The teacher-replay actor: a frozen state goes out to several teachers, their actions come back.

It does not choose states, count votes or make pairs; `rollouts.pairs` does. Neither this module
nor what it imports loads torch.
"""

import asyncio
from collections import Counter
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.provider import ProviderClient, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider_errors import ProviderError
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.pairs import FrozenState, TeacherFailure, TeacherReply


class TeacherReplayActor(MeshActor):
    """One of a pool of actors, each with its own connections to the teachers.

    controller -- FrozenState --> TeacherReplayActor == HTTP ==> N teachers
               <-- answers and failures --
    """

    kind: ClassVar[str] = "teacher_replay"

    def __init__(self) -> None:
        self._client: ProviderClient | None = None
        self._teachers: list[TeacherEndpoint] = []
        self._tools: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._running = 0

    @concurrent_endpoint
    async def load(
        self, teachers: list[TeacherEndpoint], tools: list[dict[str, Any]], timeout_s: float
    ) -> None:
        """Open a pool for these teachers; raises where one has no usable key or address.

        Asks nothing. Replaces what an earlier `load` opened.
        """
        client = ProviderClient(Timeouts(total_s=timeout_s))
        for teacher in teachers:
            client.check(teacher)
        await self._close_client()
        self._client, self._teachers, self._tools = client, list(teachers), list(tools)

    @concurrent_endpoint
    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Ask `n` teachers at once; which ones is settled by the state's seed, in turns.

        Waits until each has answered or failed, at most `timeout_s`. A failure is a value in the
        list, and counted; no teacher's failure takes another's answer away.
        """
        client = self._loaded()
        if not 1 <= n <= len(self._teachers):
            raise ValueError(
                f"n is {n}, but {len(self._teachers)} teachers are loaded: ask 1 to that many"
            )
        self._running += 1
        self.activity = f"asking about {self._running} states"
        try:
            asked = chosen_teachers(self._teachers, state.seed, n)
            asking = (ask(client, teacher, state, self._tools) for teacher in asked)
            replies = await asyncio.gather(*asking)
        finally:
            self._running -= 1
            self.activity = f"asking about {self._running} states" if self._running else "idle"
        self._counts.update(map(_counted_as, replies))
        return replies

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Close the connections. Queries under way fail; `load` opens new ones."""
        await self._close_client()

    def details(self) -> dict[str, Any]:
        return {"teachers": [t.name for t in self._teachers], "replies": dict(self._counts)}

    def _loaded(self) -> ProviderClient:
        if self._client is None:
            raise RuntimeError("no teachers are loaded: call load first")
        return self._client

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def chosen_teachers(teachers: list[TeacherEndpoint], seed: int, n: int) -> list[TeacherEndpoint]:
    """`n` teachers in a row, from a place that the seed settles, in their configured order."""
    start = seed % len(teachers)
    places = sorted((start + step) % len(teachers) for step in range(n))
    return [teachers[place] for place in places]


async def ask(
    client: ProviderClient,
    teacher: TeacherEndpoint,
    state: FrozenState,
    tools: list[dict[str, Any]],
) -> TeacherReply:
    """One teacher's answer, or its failure as a value."""
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
        return await client.complete(teacher, state.messages, tools, seed=state.seed)
    except ProviderError as error:
        return TeacherFailure(teacher.name, error.kind, str(error), clock() - started)


def _counted_as(reply: TeacherReply) -> str:
    return reply.kind.value if isinstance(reply, TeacherFailure) else "answered"
