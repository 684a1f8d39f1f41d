"""Teacher panel settings, built from a run's config, with the paths of its ledger and answer cache.

Opens no files but the ledger id, and sends no queries.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.panel.settings import PanelSettings
from composer_mesh.actors.provider.breaker import BreakerRules
from composer_mesh.actors.provider.client import Retries, TeacherEndpoint, Timeouts
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import OpenRouterConfig, TeacherConfig
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.money import Prices
from composer_mesh.tasks.loading import make_task

LEDGER_FILE = "teachers.sqlite"
CACHE_FILE = "answers.sqlite"
RUN_ID_FILE = "ledger-id"
"""File with the run's id in a ledger shared between runs; unchanged on resume."""


def panel_settings(
    config: Config, expert_url: str, run: Path, tools: Sequence[dict[str, Any]] | None = None
) -> PanelSettings:
    """Return the panel settings of the run in directory `run`; its own teachers are at
    `expert_url`.

    `tools` defaults to those of the run's task, which is then built to get them.
    """
    replay = config.replay
    own = frozenset(teacher.name for teacher in replay.teachers if teacher.kind == "builtin")
    pays = len(own) < len(replay.teachers)
    return PanelSettings(
        teachers=tuple(_endpoint(teacher, expert_url) for teacher in replay.teachers),
        tools=list(make_task(config).tools if tools is None else tools),
        timeouts=Timeouts(replay.timeout_s, replay.connect_timeout_s, replay.read_timeout_s),
        retries=Retries(attempts=replay.attempts),
        breaker=BreakerRules(replay.breaker.failures, replay.breaker.rest_s),
        budget=budget_rules(replay),
        run=_ledger_name(config.run.name, run) if pays else config.run.name,
        ledger=(replay.budget.ledger or run / LEDGER_FILE).absolute(),
        cache=(replay.cache or config.policy.cache_dir / CACHE_FILE).absolute(),
        replicas=replay.actors,
        own=own,
    )


def budget_rules(replay: ReplayConfig) -> BudgetRules:
    """Return the budget limits of a run."""
    budget = replay.budget
    return BudgetRules(
        usd=budget.usd,
        per_teacher={t.name: t.max_usd for t in replay.teachers if t.max_usd is not None},
        usd_per_day=budget.usd_per_day,
        unknown_prices=budget.unknown_prices,
        assumed_usd=budget.assumed_usd,
    )


def _endpoint(teacher: TeacherConfig, expert_url: str) -> TeacherEndpoint:
    builtin = teacher.kind == "builtin"
    return TeacherEndpoint(
        name=teacher.name,
        base_url=expert_url if builtin else str(teacher.url),
        model=teacher.name if builtin else str(teacher.model),
        api_key_env=TOKEN_ENV if builtin else teacher.key_variable,
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


def _ledger_name(name: str, run: Path) -> str:
    """Return the run's name with an id of its directory, which is created once."""
    file = run / RUN_ID_FILE
    if not file.exists():
        run.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".{RUN_ID_FILE}.{secrets.token_hex(4)}")
        made.write_text(secrets.token_hex(8), encoding="ascii")
        made.rename(file)
    return f"{name}-{file.read_text(encoding='ascii').strip()}"
