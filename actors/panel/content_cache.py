"""A content-addressed cache of paid results in SQLite: repeated and resumed runs pay once.

Values are JSON, and the first value of a key stays. Several processes may share a file.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from composer_mesh.actors.sqlite_file import FileKind, SqliteFile

TABLE = "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def content_key(content: Any) -> str:
    """Return a hash of JSON content; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ContentCache:
    """Thread-safe cache; opened by its constructor, closed by `close`.

    `what` describes the values and `setting` is the config key of the file, both for error
    messages.
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
        """Return the cached value or None; raises StoreError if the file cannot be read."""
        with self._file.reading() as rows:
            found = rows.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            return json.loads(found[0])
        except (TypeError, ValueError, RecursionError):
            raise self.damaged(key) from None

    def put(self, key: str, value: Any) -> None:
        """Store a value unless the key exists; raises StoreError if the file cannot be written."""
        text = json.dumps(value)
        with self._file.transaction() as rows:
            rows.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (key, text))

    def damaged(self, key: str) -> Exception:
        """Return the error for a value that cannot be parsed."""
        return self._file.error(f"the value of {key[:12]} is damaged")

    def close(self) -> None:
        self._file.close()
