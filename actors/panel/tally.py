"""What a panel's teachers were asked and what that came to, in counts and dollars.

Since the panel was opened, in this process; what a whole run cost is in its ledger.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.pairs import TeacherFailure, TeacherReply


@dataclass
class Tally:
    """One teacher's part."""

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
        """As plain values that JSON can hold."""
        return {
            "answered": self.answered,
            "cached": self.cached,
            "failed": dict(self.failed),
            "usd": self.usd,
        }


def replies_by_kind(tallies: Iterable[Tally]) -> dict[str, int]:
    """All replies: how many were `answered`, `cached`, or failed in which way."""
    replies: Counter[str] = Counter()
    for tally in tallies:
        replies.update(tally.failed)
        replies.update(answered=tally.answered, cached=tally.cached)
    return {kind: count for kind, count in replies.items() if count}
