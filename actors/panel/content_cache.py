"""What was paid for, kept by content in one SQLite file: a repeated or resumed run pays once.

A value is JSON, and the first one for a key stays. Several processes may share a file. What a key
is made of, and what a value is worth, is its user's business.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from composer_mesh.actors.sqlite_file import FileKind, SqliteFile

TABLE = "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def content_key(content: Any) -> str:
    """A hash of all that a value depends on, as JSON; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ContentCache:
    """Safe to use from several threads; opened by its constructor, closed by `close`.

    `what` it keeps and the config key that names its file, `setting`, are for its StoreErrors.
    """

    def __init__(self, path: Path, *, what: str, setting: str) -> None:
        kind = FileKind(
            purpose=f"keep {what}",
            repair=f"name another file with {setting}, or move this one away",
            application_id=0x434D4331,
            version=1,
            tables=(TABLE,),
        )
        self._file = SqliteFile(path, kind)

    def get(self, key: str) -> Any:
        """The kept value, or None; raises StoreError where the file cannot be read."""
        with self._file.reading() as rows:
            found = rows.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            return json.loads(found[0])
        except (TypeError, ValueError, RecursionError):
            raise self.damaged(key) from None

    def put(self, key: str, value: Any) -> None:
        """Keep a value unless one is kept; raises StoreError where the file cannot be written."""
        text = json.dumps(value)
        with self._file.transaction() as rows:
            rows.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (key, text))

    def damaged(self, key: str) -> Exception:
        """The error for a value that is not what its user put there."""
        return self._file.error(f"the value of {key[:12]} is damaged")

    def close(self) -> None:
        self._file.close()
