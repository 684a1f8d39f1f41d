"""Counts and costs of a panel's requests by teacher, since it was opened in this process.

The ledger has the costs of the complete run.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.pairs import TeacherFailure, TeacherReply


@dataclass
class Tally:
    """Counts and dollars of one teacher."""

    answered: int = 0
    cached: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0

    def count(self, reply: TeacherReply) -> None:
        self.usd += reply.usd
        if isinstance(reply, TeacherFailure):
            self.failed[reply.kind.value] += 1
        elif reply.cached:
            self.cached += 1
        else:
            self.answered += 1

    def details(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        return {
            "answered": self.answered,
            "cached": self.cached,
            "failed": dict(self.failed),
            "usd": self.usd,
        }


def replies_by_kind(tallies: Iterable[Tally]) -> dict[str, int]:
    """Return the number of replies that were `answered`, `cached`, or failed, by failure kind."""
    replies: Counter[str] = Counter()
    for tally in tallies:
        replies.update(tally.failed)
        replies.update(answered=tally.answered, cached=tally.cached)
    return {kind: count for kind, count in replies.items() if count}
