"""The page on supervised fine-tuning shows the settings that are, and names what exists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from guides import ROOT, Guide, as_a_run

from composer_mesh.configs.sft import SftConfig
from composer_mesh.rollouts.captured_episode import ToolFormats
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.directory.sft_start import OF_THIS_RUN
from composer_mesh.services.sft.config import sft_config
from composer_mesh.tasks.chat_rows import encode_row
from composer_mesh.tasks.toolbox import ToolboxTask

PAGE = Guide.read("sft.md")
ROWS = re.findall(r"^\| (`[^|]+`) \|\s*([^|]*?)\s*\|", PAGE.text, re.MULTILINE)


def test_every_file_on_the_page_exists() -> None:
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE.text):
        assert (ROOT / path).exists(), path


def test_the_settings_and_defaults_are_those_of_the_section() -> None:
    shown = dict[str, str]()
    for names, values in ROWS:
        fields = re.findall(r"`(\w+)`", names)
        shown |= dict(zip(fields, values.split(", ") if values else [""], strict=True))
    assert list(shown) == list(SftConfig.model_fields)
    for name, field in SftConfig.model_fields.items():
        unset = field.is_required() or field.default is None or field.default_factory
        known = "" if unset else field.default
        assert shown[name] == (f"{known:g}" if isinstance(known, float) else str(known)), name


def test_the_example_is_a_config_of_both_runs() -> None:
    config = as_a_run(PAGE.blocks("toml")[0])
    assert config.policy.start == "sft"
    assert sft_config(config).run.steps == 24


def test_the_example_row_is_a_conversation(tokenizer: Any, toolbox: ToolboxTask) -> None:
    (row,) = PAGE.blocks("json")
    assert any(encode_row(json.loads(row), ToolFormats(ChatFormat(tokenizer, toolbox.tools))).learn)


@pytest.mark.parametrize("key", [name for name in OF_THIS_RUN if name != "start"])
def test_keys_that_may_differ_are_named(key: str) -> None:
    assert f"`policy.{key}`" in PAGE.text
