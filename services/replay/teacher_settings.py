"""Panel settings of a run's teachers and of its hint writer, with the paths of ledgers and caches.

Opens no files but the ledger id, and sends no queries.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.panel.configured import (
    CACHE_FILE,
    PanelSettings,
    budget_rules,
    endpoint_of,
    ledger_name,
)
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.request_limiter import BreakerRules
from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import TeacherConfig
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.hints import HINT_WRITER
from composer_mesh.tasks.loading import make_task

LEDGER_FILE = "teachers.sqlite"
HINTS_FILE, HINT_LEDGER_FILE = "hints.sqlite", "hint_writer.sqlite"
HINT_RETRIES = RetryDelays(attempts=1)
"""Hints are not retried: a template is the fallback."""
HINT_BREAKER = BreakerRules(failures=4, rest_s=30.0)


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
        retries=RetryDelays(attempts=replay.attempts),
        breaker=BreakerRules(replay.breaker.failures, replay.breaker.rest_s),
        budget=budget_rules(replay.budget, replay.teachers),
        run=ledger_name(config.run.name, run) if pays else config.run.name,
        ledger=(replay.budget.ledger or run / LEDGER_FILE).absolute(),
        cache=(replay.cache or config.policy.cache_dir / CACHE_FILE).absolute(),
        replicas=replay.actors,
        own=own,
    )


def _endpoint(teacher: TeacherConfig, expert_url: str) -> TeacherEndpoint:
    endpoint = endpoint_of(teacher)
    if teacher.kind != "builtin":
        return endpoint
    return replace(endpoint, base_url=expert_url, model=teacher.name, api_key_env=TOKEN_ENV)


def hint_settings(config: Config, expert_url: str, run: Path) -> PanelSettings:
    """Return the panel settings of the hint writer of the run in directory `run`.

    A writer of kind "builtin" is at `expert_url`.
    """
    writer = config.sdpo.hints.active_writer
    assert writer is not None
    builtin, key_file = writer.kind == "builtin", writer.api_key_file
    endpoint = TeacherEndpoint(
        "hint writer",
        expert_url if builtin else str(writer.url),
        HINT_WRITER if builtin else str(writer.model),
        TOKEN_ENV if builtin else writer.key_variable,
        key_file.absolute() if key_file else None,
        concurrency=writer.max_concurrent,
        routing={} if writer.kind == "openrouter" else None,
    )
    return PanelSettings(
        teachers=(endpoint,),
        timeouts=Timeouts(writer.timeout_s),
        retries=HINT_RETRIES,
        breaker=HINT_BREAKER,
        budget=BudgetRules(
            usd=writer.budget_usd,
            unknown_prices="allow",
            assumed_usd=writer.assumed_usd,
            requests=writer.budget_requests,
        ),
        ledger=(run / HINT_LEDGER_FILE).absolute(),
        cache=(writer.cache or run / HINTS_FILE).absolute(),
        role="model",
        section="sdpo.hints.llm",
        budget_repair="raise sdpo.hints.llm.budget_requests or sdpo.hints.llm.budget_usd",
        any_address=True,
    )
