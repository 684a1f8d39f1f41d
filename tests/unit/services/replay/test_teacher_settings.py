"""What a config says about its teachers reaches the panel, and only what it says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.provider.client import ClientClosed
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import Prices
from composer_mesh.services.replay.teacher_settings import panel_settings

TEACHERS: list[dict[str, Any]] = [
    {"name": "rules", "kind": "builtin", "error_rate": 0.1},
    {
        "name": "local",
        "kind": "openai",
        "base_url": "http://gpu.test/v1",
        "model": "m",
        "api_key_file": "keys/local",
        "prompt_usd_per_million": 1.0,
        "completion_usd_per_million": 2.0,
        "usd_per_request": 0.5,
        "max_usd": 3.0,
        "max_tokens": 64,
        "temperature": 0.7,
        "concurrency": 9,
        "requests_per_minute": 60,
    },
    {
        "name": "router",
        "kind": "openrouter",
        "model": "maker/model",
        "openrouter": {"zdr": True, "max_prompt_usd_per_million": 4.0},
    },
]


@pytest.fixture
def settings(build_config: Any, tmp_path: Path) -> Any:
    def build(teachers: list[dict[str, Any]] = TEACHERS, **replay: Any) -> PanelSettings:
        chosen = {"beta": 0.1, "budget": {"usd": 5.0}, "ask": 2, **replay}
        config = build_config(replay={**chosen, "teachers": teachers})
        return panel_settings(config, "http://127.0.0.1:7/v1", tmp_path / "run")

    return build


def test_each_teacher_is_asked_where_and_how_its_table_says(settings: Any) -> None:
    rules, local, router = settings().teachers
    assert (rules.base_url, rules.model, rules.api_key_env) == (
        "http://127.0.0.1:7/v1",
        "rules",
        TOKEN_ENV,
    )
    assert (local.base_url, local.model, local.api_key_env) == ("http://gpu.test/v1", "m", None)
    assert local.api_key_file == Path("keys/local").absolute()
    assert (local.max_tokens, local.temperature) == (64, 0.7)
    assert (local.concurrency, local.requests_per_minute) == (9, 60)
    assert (router.base_url, router.api_key_env) == (
        "https://openrouter.ai/api/v1",
        "OPENROUTER_API_KEY",
    )


def test_prices_are_those_of_the_config_and_unknown_where_it_names_none(settings: Any) -> None:
    rules, local, router = settings().teachers
    assert rules.prices == Prices.per_million(0, 0)
    assert local.prices == Prices.per_million(1, 2, 0.5)
    assert router.prices is None


def test_only_openrouter_is_told_who_may_answer(settings: Any) -> None:
    rules, local, router = settings().teachers
    assert (rules.routing, local.routing) == (None, None)
    assert router.routing == {
        "require_parameters": True,
        "zdr": True,
        "max_price": {"prompt": 4.0},
    }
    plain = {"name": "r", "kind": "openrouter", "model": "x"}
    asked = settings([TEACHERS[0], plain]).teachers[1]
    assert asked.routing == {"require_parameters": True}


def test_ceilings_limits_and_waits_are_those_of_the_config(settings: Any) -> None:
    told = settings(
        timeout_s=9.0,
        connect_timeout_s=2.0,
        attempts=2,
        actors=3,
        breaker={"failures": 7, "rest_s": 4.0},
        budget={
            "usd": 5.0,
            "usd_per_day": 8.0,
            "ledger": "shared/ledger.sqlite",
            "unknown_prices": "allow",
            "assumed_usd": 0.3,
        },
    )
    assert (told.timeouts.total_s, told.timeouts.connect_s, told.timeouts.read_s) == (9, 2, None)
    assert (told.retries.attempts, told.replicas) == (2, 3)
    assert (told.breaker.failures, told.breaker.rest_s) == (7, 4.0)
    assert (told.budget.usd, told.budget.usd_per_day) == (5.0, 8.0)
    assert told.budget.per_teacher == {"local": 3.0}
    assert (told.budget.unknown_prices, told.budget.assumed_usd) == ("allow", 0.3)
    assert told.ledger == Path("shared/ledger.sqlite").absolute()
    assert pickle.loads(pickle.dumps(told)) == told


def test_a_run_has_a_ledger_of_its_own_and_shares_its_answers_unless_others_are_named(
    settings: Any, build_config: Any, tmp_path: Path
) -> None:
    told = settings()
    assert told.ledger == tmp_path / "run" / "teachers.sqlite"
    assert told.cache == build_config().policy.cache_dir.absolute() / "answers.sqlite"
    assert settings(cache="kept/c").cache == Path("kept/c").absolute()


def test_a_run_keeps_its_name_in_a_shared_ledger_and_shares_it_with_none(
    settings: Any, build_config: Any, tmp_path: Path
) -> None:
    config = build_config(replay={"beta": 0.1, "teachers": TEACHERS, "budget": {"usd": 5.0}})
    first = settings().run
    assert settings().run == first != "unit"
    (tmp_path / "run").rename(tmp_path / "run.1")
    assert settings().run != first
    assert panel_settings(config, "", tmp_path / "run.1").run == first


def test_a_run_with_teachers_of_its_own_leaves_no_trace_of_money(
    settings: Any, tmp_path: Path
) -> None:
    own = [{"name": name, "kind": "builtin"} for name in "abc"]
    told = settings(own, budget={})
    assert told.own == frozenset("abc")
    assert not told.pays
    assert not (tmp_path / "run").exists()


def test_teachers_are_told_the_tools_of_the_runs_task(settings: Any, toolbox: Any) -> None:
    assert settings().tools == list(toolbox.tools)


@pytest.mark.parametrize("error", [ClientClosed(), StoreError("file", "keep", "full", "make room")])
def test_what_a_panel_raises_travels_between_processes(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
