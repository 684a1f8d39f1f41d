"""A hint writer's answers by content, in one SQLite file: a repeated run pays once.

An answer is on disk when `put` returns. Several runs may share a file. What a key is made of and
what an answer is worth is the writer's business.
"""

import sqlite3
import threading
from pathlib import Path

BUSY_S = 10.0


class HintCacheError(Exception):
    """The file cannot be used as a cache of hints."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} cannot keep hints ({self.args[1]}): name another file with "
            "sdpo.hints.llm.cache, or move this one away"
        )


class HintCache:
    """Safe to use from several threads; opened by its constructor, closed by `close`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            self._rows.execute(
                "CREATE TABLE IF NOT EXISTS hints "
                "(key TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL)"
            )
            self._rows.commit()
        except (OSError, sqlite3.Error) as error:
            raise HintCacheError(str(path), str(error)) from None

    def get(self, key: str) -> str | None:
        """The kept answer; raises HintCacheError where the file cannot be read."""
        rows = self._run("SELECT text FROM hints WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def put(self, key: str, model: str, text: str) -> None:
        """Keep an answer, the first one for a key; raises HintCacheError where it cannot."""
        self._run("INSERT OR IGNORE INTO hints VALUES (?, ?, ?)", key, model, text)

    def _run(self, statement: str, *values: str) -> list[tuple[str, ...]]:
        with self._lock:
            try:
                with self._rows:  # commits, or rolls back
                    return self._rows.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise HintCacheError(str(self._path), str(error)) from None

    def close(self) -> None:
        with self._lock:
            self._rows.close()
