"""Which operations come next: in order for each model, fairly among clients, without waiting.

A client's virtual time is the cost of what it was served so far; the client with the least comes
next. One that was away starts at the present, so that waiting saves nothing up. Nothing here knows
clocks, processes or HTTP.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.records import Operation
from composer_mesh.services.web.errors import TOO_LARGE, TOO_MANY, RequestRefused, bad

MOST_TAKEN = 64 * 2**20
"""Bytes of the operations that are executed together, but for the last one."""
MOST_TIMES = 10_000
"""Clients above which those that are not ahead of the others are forgotten."""


class VirtualTimes:
    """The costs that clients were served."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0

    def order(self, clients: Iterable[str]) -> list[str]:
        """Return clients in the order in which they are to be served."""
        return sorted(clients, key=lambda one: (self._times.get(one, self._now), one))

    def arrive(self, client: str) -> None:
        """Let a client that had nothing to do begin at the present."""
        self._times[client] = max(self._times.get(client, 0.0), self._now)

    def serve(self, client: str, cost: float) -> None:
        """Charge a client, whose turn is the present."""
        self._now = max(self._now, self._times.get(client, 0.0))
        self._times[client] = self._times.get(client, 0.0) + cost
        if len(self._times) > MOST_TIMES:
            self._times = {name: at for name, at in self._times.items() if at > self._now}

    def leave(self, client: str) -> None:
        """Forget a client that has nothing to do and is not ahead of the others."""
        if self._times.get(client, 0.0) <= self._now:
            self._times.pop(client, None)


class OpenCounts:
    """Counts the unanswered operations of clients, and the bytes of their data, against limits."""

    def __init__(self, limits: ServeConfig) -> None:
        self._limits, self._most_bytes = limits, int(limits.max_open_mb * 1e6)
        self._most_bytes_per_client = int(limits.max_open_mb_per_client * 1e6)
        self._counts, self._bytes = dict[str, int](), dict[str, int]()
        self.total = self.bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no further operation is accepted now."""
        return self.total >= self._limits.max_open_operations

    def add(self, client: str, size: int, checked: bool = True) -> None:
        """Count one more. Raises `RequestRefused` at a limit: 413 where it can never fit."""
        own, limits = self._counts.get(client, 0), self._limits
        if checked:
            self._check_bytes(client, size)
        if checked and own >= limits.max_open_per_client:
            raise RequestRefused(
                TOO_MANY,
                f"{own} operations of yours are open, of at most {limits.max_open_per_client}: "
                "wait for some, and send this again",
            )
        if checked and self.is_full:
            raise RequestRefused(
                TOO_MANY,
                f"{self.total} operations are open, of at most {limits.max_open_operations}: send "
                "this again later",
            )
        self._counts[client], self.total = own + 1, self.total + 1
        self._bytes[client] = self._bytes.get(client, 0) + size
        self.bytes += size

    def remove(self, client: str, size: int) -> None:
        """Count one less."""
        self.total, self.bytes = self.total - 1, self.bytes - size
        if self._counts[client] == 1:
            del self._counts[client], self._bytes[client]
        else:
            self._counts[client] -= 1
            self._bytes[client] -= size

    def _check_bytes(self, client: str, size: int) -> None:
        own, most = self._bytes.get(client, 0), self._most_bytes_per_client
        if size > min(most, self._most_bytes):
            raise RequestRefused(
                TOO_LARGE,
                f"the operation has {size:,} bytes, and those that wait at most "
                f"{min(most, self._most_bytes):,}: send it in parts",
            )
        if own + size > most:
            raise RequestRefused(
                TOO_MANY,
                f"your open operations have {own:,} bytes and this one {size:,}, of at most "
                f"{most:,}: wait for some, and send this again",
            )
        if self.bytes + size > self._most_bytes:
            raise RequestRefused(
                TOO_MANY,
                f"all open operations have {self.bytes:,} bytes and this one {size:,}, of at most "
                f"{self._most_bytes:,}: send this again later",
            )


@dataclass
class _ModelQueue:
    client: str
    next_seq: int
    waiting: list[tuple[int, int, Operation]] = field(default_factory=list)


class TrainingQueue:
    """The operations of models: each model's by `seq`, without gaps; models by their clients.

    An operation without a `seq` comes after those that were there before it.
    """

    def __init__(self) -> None:
        self._models: dict[str, _ModelQueue] = {}
        self._times = VirtualTimes()

    def __len__(self) -> int:
        return sum(len(one.waiting) for one in self._models.values())

    def begin(self, model: str, client: str, next_seq: int) -> None:
        """Take a model in, whose next operation has the number `next_seq`."""
        self._models[model] = _ModelQueue(client, next_seq)

    def end(self, model: str) -> list[Operation]:
        """Forget a model; return the operations that will not be executed."""
        found = self._models.pop(model, None)
        return [] if found is None else [one for _, _, one in found.waiting]

    def check_seq(self, model: str, seq: int | None) -> None:
        """Raise `RequestRefused` for an operation that would come after later ones."""
        queue = self._models.get(model)
        if queue is not None and seq is not None and seq < queue.next_seq:
            raise bad(
                f"seq_id is {seq}, but operations up to {queue.next_seq - 1} of this model were "
                "executed or given up: number operations in the order of their execution"
            )

    def put(self, operation: Operation) -> None:
        """Queue an operation; one of a model that was unloaded meanwhile is next."""
        seq, client = operation.request.seq, operation.request.client
        if operation.model not in self._models:
            self.begin(operation.model, client, seq or 0)
        queue = self._models[operation.model]
        if not self._waits(queue.client):
            self._times.arrive(queue.client)
        if seq is None:
            seq = max([queue.next_seq - 1, *(one[0] for one in queue.waiting)])
        insort(queue.waiting, (seq, operation.number, operation), key=lambda one: one[:2])

    def take(self, models: int, each: int, cost: int) -> list[Operation]:
        """Return operations to execute together, those of one model one after another.

        At most `models` models and `each` operations of one; after `cost`, or `MOST_TAKEN` bytes,
        no further operation.
        """
        taken: list[Operation] = []
        spent, left, by_client = 0, MOST_TAKEN, self._ready()
        while by_client and models > 0 and spent < cost and left > 0:
            for client in self._times.order(by_client):
                if models <= 0 or spent >= cost or left <= 0:
                    break
                own = self._take_of(by_client[client].pop(0), each, left)
                left -= sum(one.size for one in own)
                paid = sum(one.request.cost for one in own)
                self._times.serve(client, paid)
                taken, spent, models = taken + own, spent + paid, models - 1
                if not by_client[client]:
                    del by_client[client]
        for client in {one.request.client for one in taken}:
            if not self._waits(client):
                self._times.leave(client)
        return taken

    def overdue(self, before: float) -> list[tuple[Operation, int]]:
        """Remove and return operations that waited for a gap since `before`, with its number."""
        found = []
        for queue in self._models.values():
            if queue.waiting and queue.waiting[0][0] > queue.next_seq:
                seq, _, first = queue.waiting[0]
                if first.waited_since < before:
                    found.append((first, queue.next_seq))
                    queue.waiting.pop(0)
                    queue.next_seq = seq + 1
        return found

    def _waits(self, client: str) -> bool:
        return any(one.waiting for one in self._models.values() if one.client == client)

    def _ready(self) -> dict[str, list[_ModelQueue]]:
        found: dict[str, list[_ModelQueue]] = {}
        for queue in self._models.values():
            if queue.waiting and queue.waiting[0][0] <= queue.next_seq:
                found.setdefault(queue.client, []).append(queue)
        for queues in found.values():
            queues.sort(key=lambda one: one.waiting[0][1])
        return found

    def _take_of(self, queue: _ModelQueue, each: int, left: int) -> list[Operation]:
        taken: list[Operation] = []
        while (
            len(taken) < each
            and left > 0
            and queue.waiting
            and queue.waiting[0][0] <= queue.next_seq
        ):
            seq, _, first = queue.waiting.pop(0)
            queue.next_seq, left = max(queue.next_seq, seq + 1), left - first.size
            taken.append(first)
        return taken


class SampleQueue:
    """Samples, of each client in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Operation]] = {}
        self._times = VirtualTimes()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, operation: Operation) -> None:
        """Queue an operation."""
        client = operation.request.client
        if client not in self._waiting:
            self._times.arrive(client)
        self._waiting.setdefault(client, []).append(operation)

    def first(self) -> Operation | None:
        """Return the operation that comes next, if there is one; it stays in the queue."""
        if not self._waiting:
            return None
        return self._waiting[self._times.order(self._waiting)[0]][0]

    def take(self) -> Operation | None:
        """Remove and return the operation that comes next, if there is one."""
        found = self.first()
        if found is None:
            return None
        client = found.request.client
        self._waiting[client].pop(0)
        self._times.serve(client, found.request.cost)
        if not self._waiting[client]:
            del self._waiting[client]
            self._times.leave(client)
        return found

    def remove(self, request_id: str) -> Operation | None:
        """Remove an operation that waits; None if it does not."""
        for client, waiting in list(self._waiting.items()):
            for one in waiting:
                if one.request_id == request_id:
                    waiting.remove(one)
                    if not waiting:
                        del self._waiting[client]
                    return one
        return None
