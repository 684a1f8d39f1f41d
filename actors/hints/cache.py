"""The content cache of a hint writer's answers."""

from pathlib import Path

from composer_mesh.actors.panel.content_cache import ContentCache


class HintCache:
    """Thread-safe cache of texts; opened by its constructor, closed by `close`."""

    def __init__(self, path: Path) -> None:
        self._kept = ContentCache(path, what="hints", setting="sdpo.hints.llm.cache")

    def get(self, key: str) -> str | None:
        """Return the cached answer; raises StoreError if the file cannot be read."""
        text = self._kept.get(key)
        if text is not None and not isinstance(text, str):
            raise self._kept.damaged(key)
        return text

    def put(self, key: str, text: str) -> None:
        """Store an answer unless the key exists; raises StoreError if it cannot."""
        self._kept.put(key, text)

    def close(self) -> None:
        self._kept.close()
