"""What became of the hints of one step, as counts and dollars.

    shown     template + llm + cached + fallback  = those of the error source
              sibling, feedback                   = those of the other two
    not shown refused (told the answer), too_long (did not fit the context)

Nothing here decides anything.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class HintCounts:
    """`cut` hints are shown ones, or such as did not fit afterwards; `requests` were paid for.

    `fallback` are templates that a writer's words should have been.
    """

    template: int = 0
    llm: int = 0
    cached: int = 0
    fallback: int = 0
    sibling: int = 0
    feedback: int = 0
    refused: int = 0
    too_long: int = 0
    cut: int = 0
    requests: int = 0
    usd: float = 0.0

    @property
    def shown(self) -> int:
        own = self.template + self.llm + self.cached + self.fallback
        return own + self.sibling + self.feedback

    def show(self, what: str) -> None:
        """Count one shown hint by its wording, or by its source where it has none."""
        setattr(self, what, getattr(self, what) + 1)

    def metrics(self) -> dict[str, Any]:
        """The counts as keys of `metrics.jsonl`."""
        return {f"hints/{name}": value for name, value in asdict(self).items()}
