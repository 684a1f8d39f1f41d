"""The newest answers in memory, so that most are given without reading the log."""

from __future__ import annotations

from collections import OrderedDict

from composer_mesh.plugins.tinker.server.results import Result

MOST_BYTES, MOST = 64 * 2**20, 100_000


class RecentAnswers:
    """Answers by request and client, of at most `MOST_BYTES`; the oldest are dropped."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[str, Result]] = OrderedDict()
        self._bytes = 0

    def add(self, request_id: str, client: str, answer: Result) -> None:
        """Hold an answer."""
        if request_id in self._held:
            return
        self._held[request_id] = (client, answer)
        self._bytes += len(answer.content)
        while self._bytes > MOST_BYTES or len(self._held) > MOST:
            _, (_, oldest) = self._held.popitem(last=False)
            self._bytes -= len(oldest.content)

    def of(self, client: str, request_id: str) -> Result | None:
        """Return a client's answer, if it is held."""
        held = self._held.get(request_id)
        return None if held is None or held[0] != client else held[1]

    def clear(self) -> None:
        """Forget all answers."""
        self._held.clear()
        self._bytes = 0
