"""Cache of models' answers by content in SQLite: repeated and resumed runs pay once.

The key is all that an answer depends on: endpoint, model settings and messages. It excludes the
seed and the teacher's name. Values are JSON, and the first value of a key stays. Several processes
may share a file.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.actors.sqlite_file import FileKind, SqliteFile
from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.pairs import FrozenState, TeacherAnswer

TABLE = "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def content_key(content: Any) -> str:
    """Return a hash of JSON content; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_ADAPTER = fail_fast(TeacherAnswer)


def answer_settings(teacher: TeacherEndpoint) -> dict[str, Any]:
    """Return the settings an answer depends on, without the key, limits and prices."""
    routing = teacher.routing
    if routing is not None:
        routing = {key: value for key, value in routing.items() if key != "max_price"}
    return {
        "base_url": teacher.base_url.rstrip("/"),
        "model": teacher.model,
        "max_tokens": teacher.max_tokens,
        "temperature": teacher.temperature,
        "routing": routing,
    }


def question_key(
    teacher: TeacherEndpoint, copy: int, state: FrozenState, tools: list[dict[str, Any]]
) -> str:
    """Return the cache key of one request; `copy` numbers teachers with identical settings."""
    question = {"copy": copy, "messages": state.messages, "tools": tools}
    return content_key({**answer_settings(teacher), **question})


class ResponseCache:
    """A thread-safe cache of models' answers; opened by its constructor, closed by `close`.

    `setting` is the config key of the file, for error messages.
    """

    def __init__(self, path: Path, setting: str = "replay.cache") -> None:
        kind = FileKind(
            purpose="keep models' answers",
            repair=f"name another file with {setting}, or move this one away",
            application_id=0x434D4331,
            version=1,
            tables=(TABLE,),
        )
        self._file = SqliteFile(path, kind)

    def get(self, key: str, teacher: str) -> TeacherAnswer | None:
        """Return the cached answer under this teacher's name, at no cost.

        Raises StoreError if the file cannot be read, or its value is damaged.
        """
        with self._file.reading() as rows:
            found = rows.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            answer = _ADAPTER.validate_json(found[0])
        except ValueError:
            raise self._file.error(f"the value of {key[:12]} is damaged") from None
        return replace(answer, teacher=teacher, usd=0.0, usd_known=True, cached=True)

    def put(self, key: str, answer: TeacherAnswer) -> None:
        """Store an answer unless the key exists; raises StoreError if the file is unusable."""
        text = _ADAPTER.dump_json(answer).decode()
        with self._file.transaction() as rows:
            rows.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (key, text))

    def close(self) -> None:
        self._file.close()
