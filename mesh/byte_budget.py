"""Bytes that the clients of a server hold at the same time, bounded for each and for all."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class BudgetSpent(Exception):
    """A client holds too many bytes, or all together do; `own` is whether it is the client."""

    def __init__(self, own: bool, bound: int) -> None:
        super().__init__(own, bound)
        self.own, self.bound = own, bound

    def __str__(self) -> str:
        whose = "one client" if self.own else "all clients together"
        return (
            f"unfinished requests of {whose} may hold {self.bound:,} bytes: send fewer at a time, "
            "and this one again later"
        )


class ByteBudget:
    """Counts the bytes that are held, in any thread."""

    def __init__(self, of_one: int, of_all: int) -> None:
        self._of_one, self._of_all = of_one, of_all
        self._held: dict[str, int] = {}
        self._total = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._total

    def held_by(self, client: str) -> HeldBytes:
        """Return a context in which a client holds bytes; its end releases them."""
        return HeldBytes(self, client)

    def change(self, client: str, count: int) -> None:
        """Count bytes more, or less; raise BudgetSpent where they would be too many."""
        with self._lock:
            own = self._held.get(client, 0) + count
            if count > 0 and own > self._of_one:
                raise BudgetSpent(True, self._of_one)
            if count > 0 and self._total + count > self._of_all:
                raise BudgetSpent(False, self._of_all)
            self._total += count
            if own:
                self._held[client] = own
            else:
                self._held.pop(client, None)


class HeldBytes:
    """The bytes of one request."""

    def __init__(self, budget: ByteBudget, client: str) -> None:
        self._budget, self._client, self._count = budget, client, 0

    def add(self, count: int) -> None:
        """Hold bytes more; raise BudgetSpent where they would be too many."""
        self._budget.change(self._client, count)
        self._count += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.change(self._client, -self._count)
