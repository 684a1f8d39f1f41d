"""Outcome counts and dollars of the hints of one step.

shown     template + llm + cached + fallback  = hints of the error source
          sibling, feedback                   = hints of the other two sources
not shown refused (leaked the answer), too_long (did not fit into the context),
          unwritten (could not be made: a fact that its template names is missing)
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class HintCounts:
    """Counts of one step. `cut` counts truncated hints, shown or too long; `requests` were paid.

    `fallback` counts templates that were used in place of a writer's text. `faults` are the reasons
    of those that are unwritten, each once.
    """

    template: int = 0
    llm: int = 0
    cached: int = 0
    fallback: int = 0
    sibling: int = 0
    feedback: int = 0
    refused: int = 0
    too_long: int = 0
    unwritten: int = 0
    cut: int = 0
    requests: int = 0
    usd: float = 0.0
    faults: dict[str, None] = field(default_factory=dict)

    @property
    def shown(self) -> int:
        own = self.template + self.llm + self.cached + self.fallback
        return own + self.sibling + self.feedback

    def show(self, what: str) -> None:
        """Count one shown hint by its wording, or by its source if it has none."""
        setattr(self, what, getattr(self, what) + 1)

    def fail(self, reason: str) -> None:
        """Count one hint that could not be written."""
        self.unwritten += 1
        self.faults[reason] = None

    def metrics(self) -> dict[str, Any]:
        """Return the counts under their `metrics.jsonl` keys."""
        counts = {name: value for name, value in asdict(self).items() if name != "faults"}
        return {f"hints/{name}": value for name, value in counts.items()}
