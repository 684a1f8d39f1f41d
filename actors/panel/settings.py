"""All that a panel of teachers is told: whom it asks, how, and at what cost.

Holds no key and opens nothing.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.breaker import BreakerRules
from composer_mesh.actors.provider.client import Retries, TeacherEndpoint, Timeouts
from composer_mesh.rollouts.budget import BudgetRules


@dataclass(frozen=True)
class PanelSettings:
    """All that a panel is told.

    `run` is what its requests count for in the ledger; without a `ledger` the ceilings hold for
    this panel alone, without a `cache` nothing is kept. `replicas` panels share the teachers'
    concurrency and rate limits. `own` names the teachers that the run serves itself: they cost
    nothing, so they are neither metered nor kept.
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

    def __post_init__(self) -> None:
        names = Counter(teacher.name for teacher in self.teachers)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"teachers holds {repeated[0]!r} more than once: rename all but one")
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}, below 1: at least one panel asks")

    @property
    def pays(self) -> bool:
        """Whether any teacher may cost something."""
        return any(teacher.name not in self.own for teacher in self.teachers)
