"""Cache of teachers' answers by content, so that the same request is never paid twice.

The key is all that an answer depends on: endpoint, model settings and messages. It excludes the
seed and the teacher's name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_mesh.actors.panel.content_cache import ContentCache, content_key
from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.pairs import FrozenState, TeacherAnswer

_ADAPTER = fail_fast(TeacherAnswer)


def asked_of(teacher: TeacherEndpoint) -> dict[str, Any]:
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
    asked = {"copy": copy, "messages": state.messages, "tools": tools}
    return content_key({**asked_of(teacher), **asked})


class ResponseCache:
    """A thread-safe cache of teachers' answers."""

    def __init__(self, path: Path, setting: str = "replay.cache") -> None:
        self._kept = ContentCache(path, what="teachers' answers", setting=setting)

    def get(self, key: str, teacher: str) -> TeacherAnswer | None:
        """Return the cached answer under this teacher's name, at no cost; StoreError if damaged."""
        value = self._kept.get(key)
        if value is None:
            return None
        try:
            answer = _ADAPTER.validate_python(value)
        except ValidationError:
            raise self._kept.damaged(key) from None
        return replace(answer, teacher=teacher, usd=0.0, usd_known=True, cached=True)

    def put(self, key: str, answer: TeacherAnswer) -> None:
        """Store an answer unless the key exists; raises StoreError if the file is unusable."""
        self._kept.put(key, _ADAPTER.dump_python(answer, mode="json"))

    def close(self) -> None:
        self._kept.close()
