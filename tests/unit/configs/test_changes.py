"""What may be changed in the config of a run that goes on: each key by name, unknown ones never.

The config of hints: what is refused and why, and which actors a run gets for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from composer_mesh.configs.changes import RULES, SAFE, Change, changes, different
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.services.cli import main

TEACHER = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}


PRICES = {"prompt_usd_per_million": 1.0, "completion_usd_per_million": 1.0}


TEACHERS = [{"name": name, **TEACHER, **PRICES} for name in "ab"]


REPLAY = {"beta": 0.1, "ask": 2, "budget": {"usd": 1.0}, "teachers": TEACHERS}


def changed(build_config: Any, before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    return changes(build_config(**before), build_config(**after))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "deadline_s", 7.0),
        ("run", "steps", 9),
        ("generator", "replicas", 2),
        ("trainer", "ranks", 2),
        ("trainer", "checkpoint_every", 3),
        ("weights", "transport", "disk"),
        ("supervision", "trainer_restarts", 9),
        ("logprob_mismatch", "alarm_mean", 0.7),
        ("eval", "every", 2),
        ("schedule", "max_lag", 1),
        ("late_rewards", "max_age", 4),
    ],
)
def test_what_no_trained_step_depends_on_may_change(
    build_config: Any, section: str, key: str, value: object
) -> None:
    base = {"run": {"name": "unit", "steps": 3}}
    after = {**base, section: {**base.get(section, {}), key: value}}
    (change,) = changed(build_config, base, after)
    assert (change.key, change.after, change.safe) == (f"{section}.{key}", value, True)
    assert f"{section}.{key}: " in str(change)
    assert change.reason


@pytest.mark.parametrize(
    ("section", "key", "value", "reason"),
    [
        ("run", "seed", 4, "episodes and samples"),
        ("run", "name", "other", "ledger"),
        ("trainer", "lr", 1e-5, "trained once more, as they were"),
        ("schedule", "prompts_per_step", 3, "groups are counted"),
        ("generator", "temperature", 0.5, "sampled in the former way"),
        ("environment", "max_turns", 5, "former rules"),
        ("policy", "max_context", 400, "former model"),
        ("loss", "clip_low", 0.1, "former loss"),
    ],
)
def test_what_a_trained_step_depends_on_is_refused_with_its_reason(
    build_config: Any, section: str, key: str, value: object, reason: str
) -> None:
    base = {"run": {"name": "unit", "seed": 3, "steps": 3}}
    after = {**base, section: {**base.get(section, {}), key: value}}
    (change,) = changed(build_config, base, after)
    assert not change.safe
    assert reason in change.reason


FALLING = {"trainer": {"lr_schedule": "linear"}}
SLOWER = [{**TEACHERS[0], "concurrency": 2, "max_usd": 0.5}, {**TEACHERS[1], "model": "n"}]
OTHER_BUDGET = {"usd": 2.0, "ledger": "other.sqlite"}


@pytest.mark.parametrize(
    ("before", "after", "safe"),
    [
        (
            {"run": {"name": "unit", "steps": 3}, **FALLING},
            {"run": {"name": "unit", "steps": 4}, **FALLING},
            {"run.steps": False},
        ),
        ({"schedule": {"max_lag": 2}}, {"schedule": {"max_lag": 1}}, {"schedule.max_lag": False}),
        (
            {"schedule": {"max_lag": 1, "carried_groups": 2}},
            {"schedule": {"max_lag": 2, "carried_groups": 2}},
            {"schedule.max_lag": False},
        ),
        (
            {"schedule": {"max_lag": 1, "carried_groups": 2, "max_token_age": 3}},
            {"schedule": {"max_lag": 2, "carried_groups": 2, "max_token_age": 3}},
            {"schedule.max_lag": True},
        ),
        (
            {"replay": REPLAY},
            {"replay": {**REPLAY, "teachers": SLOWER}},
            {
                "replay.teachers.0.concurrency": True,
                "replay.teachers.0.max_usd": True,
                "replay.teachers.1.model": False,
            },
        ),
        (
            {"replay": REPLAY},
            {"replay": {**REPLAY, "teachers": [*TEACHERS, {**TEACHERS[0], "name": "c"}]}},
            {"replay.teachers": False},
        ),
        (
            {"replay": REPLAY},
            {"replay": {**REPLAY, "budget": OTHER_BUDGET}},
            {"replay.budget.usd": True, "replay.budget.ledger": False},
        ),
    ],
    ids=[
        *("steps of a moving rate", "smaller lag", "larger lag and age", "larger lag alone"),
        *("limits and model", "more teachers", "budget"),
    ],
)
def test_whether_a_change_is_safe_depends_on_the_key_and_for_some_on_the_values(
    build_config: Any, before: dict[str, Any], after: dict[str, Any], safe: dict[str, bool]
) -> None:
    assert {one.key: one.safe for one in changed(build_config, before, after)} == safe


def test_every_rule_names_keys_that_the_schema_has(build_config: Any) -> None:
    """A pattern that fits nothing would be a safe key that was renamed."""
    hints = {"writer": "llm", "llm": TEACHER}
    server = {"name": "far", "transport": "http", "url": "http://x/mcp"}
    config = build_config(
        replay=REPLAY,
        sdpo={"alpha": 0.1, "hints": hints},
        judges={"models": [TEACHERS[0]], "budget": {"usd": 1.0}},
        environment={"mcp": [server]},
        sft={"steps": 1, "demonstrations": 1},
    )
    keys = {key for key, _, _ in different(config.model_dump(mode="json"), {})} | set(
        _leaves(config.model_dump(mode="json"))
    )
    from fnmatch import fnmatchcase

    for pattern, _ in SAFE:
        assert any(fnmatchcase(key, pattern) for key in keys), pattern
    assert RULES.keys() <= keys


def _leaves(table: Any, path: str = "") -> list[str]:
    if isinstance(table, list):
        table = {str(n): one for n, one in enumerate(table)}
    if not isinstance(table, dict):
        return [path]
    return [
        leaf
        for key, value in table.items()
        for leaf in [f"{path}.{key}".strip("."), *_leaves(value, f"{path}.{key}".strip("."))]
    ]


def test_equal_configs_have_no_changes(build_config: Any) -> None:
    config: Config = build_config()
    assert changes(config, config) == []


QUICKSTART = ROOT / "configs" / "quickstart.toml"


LLM = 'sdpo.hints.llm={kind="openai", base_url="https://x.test/v1", model="m"}'


ASKING = ["sdpo.hints.writer=llm", LLM]


BUILTIN = ["sdpo.hints.writer=llm", 'sdpo.hints.llm={kind="builtin"}']


BROKEN = {
    "no writer": (["sdpo.hints.writer=llm"], r"llm is not set.*\[sdpo\.hints\.llm\]"),
    "a writer of nothing": (
        [*ASKING, 'sdpo.hints.sources=["sibling"]'],
        "words only hints of the source 'error': add 'error' to sources",
    ),
    "a source twice": (
        ['sdpo.hints.sources=["error", "error"]'],
        "'error' can stand once: remove the later one",
    ),
    "no source": (["sdpo.hints.sources=[]"], r"sdpo\.hints\.sources"),
    "unknown source": (['sdpo.hints.sources=["oracle"]'], r"sdpo\.hints\.sources\[0\]"),
    "no length": (["sdpo.hints.max_tokens=0"], r"sdpo\.hints\.max_tokens = 0"),
    "a template with an attribute": (
        ['sdpo.hints.templates.no_answer="{tool.x}"'],
        "'tool.x' is not a plain field name",
    ),
    "an openai writer without a model": (
        ["sdpo.hints.writer=llm", 'sdpo.hints.llm={kind="openai", base_url="https://x/v1"}'],
        "model is not set but kind is 'openai'",
    ),
    "a builtin writer with an address": (
        ['sdpo.hints.llm={kind="builtin", model="m"}'],
        "kind is 'builtin', which does not read it: remove model",
    ),
    "an address without a scheme": (
        ['sdpo.hints.llm={kind="openai", base_url="x.test", model="m"}'],
        "must begin with http:// or https://",
    ),
    "a budget below one request": (
        [LLM, "sdpo.hints.llm.budget_usd=0.0001"],
        "no request may ever be sent: raise budget_usd",
    ),
}


def load(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("name", BROKEN)
def test_hints_that_cannot_be_are_refused_with_the_repair(name: str) -> None:
    overrides, message = BROKEN[name]
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_hints_read_back_as_they_were_written(tmp_path: Path) -> None:
    config = load(*ASKING, "sdpo.hints.templates.mine=Look at {x}.", 'sdpo.hints.sources=["error"]')
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    assert load_config(path) == config
    assert config.sdpo.hints.templates == {"mine": "Look at {x}."}


def kinds(*overrides: str) -> list[str]:
    return [row.kind for row in plan_mesh(load(*overrides)).actors]


def test_only_a_run_whose_hints_a_model_words_has_a_writer() -> None:
    assert "hint_writer" not in kinds()
    assert "hint_writer" not in kinds(LLM)
    assert "hint_writer" not in kinds(*ASKING, "sdpo.alpha=0")
    assert "hint_writer" in kinds(*ASKING)


def test_the_builtin_writer_needs_the_expert_server_and_another_does_not() -> None:
    assert "expert_server" in kinds(*BUILTIN, "replay.beta=0")
    assert "expert_server" not in kinds(*ASKING, "replay.beta=0")
    assert "expert_server" not in kinds(*BUILTIN, "replay.beta=0", "sdpo.alpha=0")


def test_the_plan_says_whom_the_writer_asks() -> None:
    rows = [str(row) for row in plan_mesh(load(*ASKING)).transports]
    assert any(row.startswith("errors and hints: hint_writer -> https://x.test/v1") for row in rows)


def test_a_missing_key_of_the_writer_is_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = [*ASKING, "sdpo.hints.llm.api_key_env=NO_SUCH_KEY_HERE"]
    arguments = [part for text in sets for part in ("--set", text)]
    assert main(["check", str(QUICKSTART), *arguments]) == 2
    assert "environment variable NO_SUCH_KEY_HERE" in capsys.readouterr().err
