"""Teachers' answers kept by content, so that the same question is never paid twice.

The key is all that an answer depends on: where and how the model is asked, and what. The seed is
left out, and so is the teacher's name. Nothing here asks anybody.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_mesh.actors.panel.content_cache import ContentCache, content_key
from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.rollouts.pairs import FrozenState, TeacherAnswer

_ADAPTER = TypeAdapter(TeacherAnswer)


def asked_of(teacher: TeacherEndpoint) -> dict[str, Any]:
    """What of a teacher its answers depend on: neither its key nor its limits, nor any price."""
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
    """The key of one question. `copy` tells teachers apart that are asked in the same way."""
    asked = {"copy": copy, "messages": state.messages, "tools": tools}
    return content_key({**asked_of(teacher), **asked})


class ResponseCache:
    """Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._kept = ContentCache(path, what="teachers' answers", setting="replay.cache")

    def get(self, key: str, teacher: str) -> TeacherAnswer | None:
        """The kept answer as this teacher's, at no cost; raises StoreError where it is damaged."""
        value = self._kept.get(key)
        if value is None:
            return None
        try:
            answer = _ADAPTER.validate_python(value)
        except ValidationError:
            raise self._kept.damaged(key) from None
        return replace(answer, teacher=teacher, usd=0.0, usd_known=True, cached=True)

    def put(self, key: str, answer: TeacherAnswer) -> None:
        """Keep an answer unless one is kept; raises StoreError where the file is unusable."""
        self._kept.put(key, _ADAPTER.dump_python(answer, mode="json"))

    def close(self) -> None:
        self._kept.close()
