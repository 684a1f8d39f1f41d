"""Calls from one actor to another in batches: many calls a message, answers as they are ready.

    caller: CallStream -- calls, cancellations --> StreamServer of the called actor
            CallStream <-- answers ------------- its endpoints, each call in its own task

Both sides write to a port of the other, which costs a fraction of a call to an endpoint. A
cancelled call is cancelled at the other end too. Messages to a dead process are lost without an
error: whoever learns of a death calls `CallStream.lose`, or `StreamServer.close_calls` at the other
end. Calls have no deadline of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from monarch.actor import Channel, Port, PortReceiver

from composer_mesh.mesh.call_server import (
    LOAD,
    LONGEST_WAIT_S,
    Caller,
    CallServer,
    Endpoint,
    Item,
    MessageBatcher,
    messages_of,
)
from composer_mesh.mesh.supervision import ActorDied, RemoteError, call
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, reported_to_loop

OPEN_DEADLINE_S = 45.0
"""Longest wait for an actor to take calls. It is known to be alive, and by default counts as hung
after 30 s. Without an answer the link between the two processes is broken: Monarch opens it once,
and drops every later message without an error where that found no memory."""


class Calls(Protocol):
    """Calls to one actor; `CallStream` implements it between processes."""

    @property
    def load(self) -> int: ...

    async def call(self, endpoint: str, /, *args: Any) -> Any: ...

    def lose(self, died: ActorDied) -> None: ...

    async def close(self) -> None: ...


class CallStream(Caller):
    """Calls to one actor, on one event loop of an actor or of the controller."""

    def __init__(
        self,
        caller: str,
        actor: str,
        ref: Any,
        longest_wait_s: float = LONGEST_WAIT_S,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`ref` is the Monarch reference of a `MeshActor`; both names are those in the run.

        A caller has one stream to an actor; calls and answers wait for others at most
        `longest_wait_s`. `failed` is called where the actor takes no calls, though it is not known
        to be dead, and where answers can no longer be read: only a new process connects again.
        """
        super().__init__()
        self._failed = failed
        self.caller, self.actor = caller, actor
        self._others = 0
        self._calls: Port[list[Item]] | None = None
        self._early: list[Item] = []
        self._longest_wait_s = longest_wait_s
        self._outgoing = MessageBatcher(self._send, longest_wait_s)
        self._died: ActorDied | None = None
        self._tasks = BackgroundTasks(self._connection_failed)
        answers, receiver = Channel[list[Item]].open()
        self._tasks.start(f"calls to {actor}", self._connect(ref, answers))
        self._tasks.start(f"answers of {actor}", self._receive(receiver))

    @property
    def load(self) -> int:
        """Unanswered calls of this stream, and of other callers at the actor's last message."""
        return len(self.unanswered) + self._others

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint. Waits for its answer; raises its error, or `ActorDied`.

        The actor's own exception has a `RemoteError` with its traceback as its cause.
        """
        began = asyncio.get_running_loop().time()
        try:
            return await super().call(endpoint, *args)
        finally:
            took_s = asyncio.get_running_loop().time() - began
            self._outgoing.took(took_s, len(self.unanswered))

    def post(self, item: Item) -> None:
        self._outgoing.add(item)

    def failure(self, endpoint: str, text: str) -> RemoteError:
        return RemoteError(self.actor, endpoint, text)

    def lose(self, died: ActorDied) -> None:
        """End every call, and each later one, because the called actor is dead."""
        first = self._died = self._died or died
        self.end_calls(lambda *_: type(first)(*first.args))

    async def close(self) -> None:
        """Stop receiving answers; calls that still wait end as if the actor had died."""
        self.lose(ActorDied(self.actor, "the connection to it was closed"))
        self._outgoing.close()
        await self._tasks.close()

    async def _connect(self, ref: Any, answers: Port[list[Item]]) -> None:
        opened = ref.open_calls.call_one(self.caller, answers, self._longest_wait_s)
        self._calls = await call(opened, OPEN_DEADLINE_S, self.actor, "open_calls")
        early, self._early = self._early, []
        for items in messages_of(early):
            self._send(items)

    def _send(self, items: list[Item]) -> None:
        if self._calls is None:
            self._early += items
        else:
            self._calls.send(items)

    async def _receive(self, receiver: PortReceiver[list[Item]]) -> None:
        while True:
            for item in await received(receiver):
                if item[1] == LOAD:
                    self._others = item[0]
                else:
                    self.settle(item)
            await asyncio.sleep(0)  # many messages may be there already

    def _connection_failed(self, name: str, error: BaseException) -> None:
        self.lose(ActorDied(self.actor, f"the connection to it failed: {error}"))
        if isinstance(error, ActorDied):
            return  # its owner finds that out too
        if self._failed is None:
            reported_to_loop(name, error)
        else:
            self._failed(error)


class StreamServer(CallServer):
    """Runs the calls that arrive at one actor from the `CallStream`s of other processes."""

    def __init__(
        self, endpoint: Callable[[str], Endpoint], failed: Callable[[BaseException], None]
    ) -> None:
        super().__init__(endpoint, failed)
        self._reading: dict[str, asyncio.Task[None]] = {}

    def open(
        self, caller: str, answers: Port[list[Item]], longest_wait_s: float = LONGEST_WAIT_S
    ) -> Port[list[Item]]:
        """Return the port that a caller sends its calls to; they are answered to `answers`."""
        calls, receiver = Channel[list[Item]].open()
        self.answer_to(caller, answers.send, longest_wait_s)
        self._reading[caller] = asyncio.create_task(self._read(caller, receiver))
        self._reading[caller].add_done_callback(self._ended)
        return calls

    async def close_calls(self, caller: str) -> None:
        """Cancel the calls of a caller that is dead. Waits until they have ended."""
        if (reading := self._reading.pop(caller, None)) is not None:
            await cancel_and_wait([reading])
        await super().close_calls(caller)

    async def _read(self, caller: str, receiver: PortReceiver[list[Item]]) -> None:
        while True:
            self.take(caller, await received(receiver))
            await asyncio.sleep(0)  # many messages may be there already


async def received(receiver: PortReceiver[list[Item]]) -> list[Item]:
    """Return the next message of a port.

    As `PortReceiver.recv` does, which in Monarch 0.7 decodes in a thread of Tokio and takes half as
    much CPU again. Monarch 0.8 has no other way.
    """
    raw = getattr(receiver._receiver, "recv_task", None)
    if raw is None:
        return await receiver.recv()
    return receiver._process(await raw().spawn_handle())
