"""The settings of a teacher panel: endpoints, limits, budget. They contain no API key."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.breaker import BreakerRules
from composer_mesh.actors.provider.client import Retries, TeacherEndpoint, Timeouts
from composer_mesh.rollouts.budget import BudgetRules


@dataclass(frozen=True)
class PanelSettings:
    """The settings of a teacher panel.

    `run` is the ledger account of its requests; without a `ledger` the ceilings hold for this panel
    alone, without a `cache` no answer is stored. `replicas` panels share the teachers' concurrency
    and rate limits. `own` names the teachers that the run serves itself: they are free, so they are
    neither metered nor cached. `tools_of` holds the tools of tasks that have their own. Errors call
    the models by their `role`, and name keys of `section`.
    """

    teachers: tuple[TeacherEndpoint, ...]
    tools: list[dict[str, Any]] = field(default_factory=list)
    timeouts: Timeouts = field(default_factory=partial(Timeouts, total_s=30.0))
    retries: Retries = field(default_factory=Retries)
    breaker: BreakerRules = field(default_factory=BreakerRules)
    budget: BudgetRules = field(default_factory=BudgetRules)
    run: str = "run"
    ledger: Path | None = None
    cache: Path | None = None
    replicas: int = 1
    own: frozenset[str] = frozenset()
    tools_of: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    role: str = "teacher"
    section: str = "replay"

    def __post_init__(self) -> None:
        names = Counter(teacher.name for teacher in self.teachers)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"teachers holds {repeated[0]!r} more than once: rename all but one")
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}, below 1: at least one panel asks")

    def check_shared(self) -> None:
        """Raise ValueError where several processes would not see what the others spend."""
        if self.pays and self.budget.usd > 0 and self.ledger is None:
            raise ValueError(
                f"budget.usd is {self.budget.usd} but ledger is None, so no replica would see "
                "what the others spend: name one file for all of them"
            )

    @property
    def pays(self) -> bool:
        """Whether any teacher may cost something."""
        return any(teacher.name not in self.own for teacher in self.teachers)
