"""A ledger whose writes wait for a gate, or break."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from composer_mesh.actors.panel.ledger import LEDGER, Ledger
from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.rollouts.budget import BudgetRules, dollars


class GatedFile(SqliteFile):
    """A file in memory whose transactions wait for a gate; counts them."""

    def __init__(self) -> None:
        self.gate, self.transactions, self.breaks = threading.Event(), 0, False
        self.gate.set()
        super().__init__(None, LEDGER)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        nested = self._rows.in_transaction
        if not nested:
            self.gate.wait()
            self.transactions += 1
        with super().transaction() as rows:
            yield rows
            if self.breaks and not nested:
                raise StoreError("ledger", "keep the ledger", "disk full", "make room")


class GatedLedger(Ledger):
    """A ledger of `usd_nano` nano-dollars in such a file."""

    file: GatedFile

    def __init__(self, usd_nano: int) -> None:
        super().__init__(None, BudgetRules(usd=dollars(usd_nano)), "run")
        self.file.close()
        self.file = GatedFile()
        self.file.transactions = 0
