"""The page on the trainer shows the settings and defaults that are, and names what exists."""

from __future__ import annotations

import re
import tomllib

import pytest
from guides import ROOT, Guide, as_a_run, names_in_code

from composer_mesh.configs.trainer import PROJECTIONS, LoraConfig, MoeConfig, TrainerConfig

PAGE = Guide.read("trainer.md")
ROWS = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", PAGE.text, re.MULTILINE))
SHOWN = {
    name: value
    for names, values in ROWS.items()
    for name, value in zip(re.findall(r"`(\w+)`", names), values.split(", "), strict=False)
}


def test_every_name_on_the_page_exists() -> None:
    procs = {path.stem for path in (ROOT / "tests" / "procs").rglob("*.py")}
    assert PAGE.names() - names_in_code() - procs == set()


def test_the_example_is_a_run() -> None:
    trainer = as_a_run(PAGE.blocks("toml")[0]).trainer
    assert trainer.sharded
    assert trainer.packing


def test_every_file_on_the_page_exists() -> None:
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE.text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "name", [name for name in TrainerConfig.model_fields if name not in ("lora", "backend", "moe")]
)
def test_each_setting_stands_there_with_its_default(name: str) -> None:
    default = getattr(TrainerConfig(), name)
    if isinstance(default, bool | str):
        assert SHOWN[name] == str(default).lower()
    else:
        assert float(SHOWN[name]) == default


def test_the_settings_of_mixtures_are_the_ones_that_exist() -> None:
    (block,) = [one for one in PAGE.blocks("toml") if "[trainer.moe]" in one]
    shown = tomllib.loads(block)["trainer"]["moe"]
    assert set(shown) == set(MoeConfig.model_fields)
    assert MoeConfig.model_validate(shown).router_replay


def test_each_setting_of_adapters_stands_there_with_its_default() -> None:
    for name in ("rank", "alpha", "dropout"):
        assert f"`{name}` ({getattr(LoraConfig(), name):g})" in PAGE.text
    assert len(PROJECTIONS) == 7
