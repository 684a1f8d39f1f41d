"""The config of hints: what is refused and why, and which actors a run gets for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.services.cli import main

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
        "'tool.x' is no plain field name",
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
