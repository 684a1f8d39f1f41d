"""A hint writer's answers by content: the content cache, holding sentences.

What a key is made of and what an answer is worth is the writer's business.
"""

from pathlib import Path

from composer_mesh.actors.panel.content_cache import ContentCache


class HintCache:
    """Safe to use from several threads; opened by its constructor, closed by `close`."""

    def __init__(self, path: Path) -> None:
        self._kept = ContentCache(path, what="hints", setting="sdpo.hints.llm.cache")

    def get(self, key: str) -> str | None:
        """The kept answer; raises StoreError where the file cannot be read."""
        text = self._kept.get(key)
        if text is not None and not isinstance(text, str):
            raise self._kept.damaged(key)
        return text

    def put(self, key: str, text: str) -> None:
        """Keep an answer, the first one for a key; raises StoreError where it cannot."""
        self._kept.put(key, text)

    def close(self) -> None:
        self._kept.close()
