"""Panel settings from a config: endpoints, ceilings, and the files of ledgers and answers.

Opens no files but the ledger id, and sends nothing.

The settings of a teacher panel: endpoints, limits, budget. They contain no API key.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.request_limiter import BreakerRules
from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import BudgetConfig, OpenRouterConfig, TeacherConfig
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.rollouts.budget import BudgetRules, Prices


@dataclass(frozen=True)
class PanelSettings:
    """The settings of a teacher panel.

    `run` is the ledger account of its requests; without a `ledger` the ceilings hold for this panel
    alone, without a `cache` no answer is stored. `replicas` panels share the teachers' concurrency
    and rate limits. `own` names the teachers that the run serves itself: they are free, so they are
    neither metered nor cached. `tools_of` holds the tools of tasks that have their own. Errors call
    the models by their `role`, and name keys of `section`; `budget_repair` is what to do where its
    budget is spent, if not what [replay] says. With `any_address` an answer is cached for the model
    at whatever URL.
    """

    teachers: tuple[TeacherEndpoint, ...]
    tools: list[dict[str, Any]] = field(default_factory=list)
    timeouts: Timeouts = field(default_factory=partial(Timeouts, total_s=30.0))
    retries: RetryDelays = field(default_factory=RetryDelays)
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
    budget_repair: str = ""
    any_address: bool = False

    def __post_init__(self) -> None:
        names = Counter(teacher.name for teacher in self.teachers)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"teachers holds {repeated[0]!r} more than once: rename all but one")
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas} but must be 1 or more")

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


CACHE_FILE = "answers.sqlite"
JUDGES_FILE = "judges.sqlite"
RUN_ID_FILE = "ledger-id"
"""File with the run's id in a ledger shared between runs; unchanged on resume."""


def judge_settings(config: Config, run: Path | None) -> PanelSettings:
    """Return the settings of a run's judges; their ledger is in its directory, if there is one."""
    judges = config.judges
    ledger = judges.budget.ledger or (None if run is None else run / JUDGES_FILE)
    return PanelSettings(
        teachers=tuple(endpoint_of(one) for one in judges.models),
        timeouts=Timeouts(judges.timeout_s, judges.connect_timeout_s, judges.read_timeout_s),
        retries=RetryDelays(attempts=judges.attempts),
        breaker=BreakerRules(judges.breaker.failures, judges.breaker.rest_s),
        budget=budget_rules(judges.budget, judges.models),
        run=config.run.name if run is None else ledger_name(config.run.name, run),
        ledger=None if ledger is None else ledger.absolute(),
        cache=(judges.cache or config.policy.cache_dir / CACHE_FILE).absolute(),
        replicas=judges.actors,
        role="judge",
        section="judges",
    )


def budget_rules(budget: BudgetConfig, models: Sequence[TeacherConfig]) -> BudgetRules:
    """Return the budget limits of a run for some models."""
    return BudgetRules(
        usd=budget.usd,
        per_teacher={t.name: t.max_usd for t in models if t.max_usd is not None},
        usd_per_day=budget.usd_per_day,
        unknown_prices=budget.unknown_prices,
        assumed_usd=budget.assumed_usd,
    )


def endpoint_of(teacher: TeacherConfig) -> TeacherEndpoint:
    """Return the endpoint of a configured model that the run does not serve itself."""
    return TeacherEndpoint(
        name=teacher.name,
        base_url=str(teacher.url),
        model=str(teacher.model),
        api_key_env=teacher.key_variable,
        api_key_file=teacher.api_key_file.absolute() if teacher.api_key_file else None,
        max_tokens=teacher.max_tokens,
        temperature=teacher.temperature,
        prices=_prices(teacher),
        concurrency=teacher.concurrency,
        requests_per_minute=teacher.requests_per_minute,
        routing=_routing(teacher),
    )


def _prices(teacher: TeacherConfig) -> Prices | None:
    """Return a teacher's prices, None where the config does not give them."""
    if not teacher.has_prices:
        return None
    return Prices.per_million(
        teacher.prompt_usd_per_million or 0.0,
        teacher.completion_usd_per_million or 0.0,
        teacher.usd_per_request or 0.0,
    )


def _routing(teacher: TeacherConfig) -> dict[str, Any] | None:
    """Return OpenRouter's `provider` object; None for every other kind."""
    if teacher.kind != "openrouter":
        return None
    wanted = teacher.openrouter or OpenRouterConfig()
    limits = {
        "prompt": wanted.max_prompt_usd_per_million,
        "completion": wanted.max_completion_usd_per_million,
    }
    routing = {
        "require_parameters": wanted.require_parameters,
        "enforce_distillable_text": wanted.enforce_distillable_text,
        "data_collection": wanted.data_collection,
        "zdr": wanted.zdr,
        "max_price": {key: usd for key, usd in limits.items() if usd is not None} or None,
    }
    return {key: value for key, value in routing.items() if value is not None}


def ledger_name(name: str, run: Path) -> str:
    """Return the run's name with an id of its directory, which is created once."""
    file = run / RUN_ID_FILE
    if not file.exists():
        run.mkdir(parents=True, exist_ok=True)
        with OpenFolder(run) as folder:
            folder.write_whole(RUN_ID_FILE, secrets.token_hex(8).encode(), synced=False)
    return f"{name}-{file.read_text(encoding='ascii').strip()}"
