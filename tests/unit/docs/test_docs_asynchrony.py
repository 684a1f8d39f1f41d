"""The page about asynchrony says what is: its settings parse, its names exist."""

from __future__ import annotations

import re

from guides import ROOT, Guide, as_a_run

from composer_mesh.configs.schema import ScheduleConfig
from composer_mesh.rollouts import window
from composer_mesh.services.schedule.metrics import sync_metrics

PAGE = Guide.read("asynchrony.md")


def test_the_block_shows_every_key_of_its_section() -> None:
    (block,) = PAGE.blocks("toml")
    assert as_a_run(block).schedule.max_lag == 2
    for name, field in ScheduleConfig.model_fields.items():
        assert re.search(rf"^{name} = ", block, re.MULTILINE), name
        if name == "max_lag":
            assert f"default {field.default}" in block


def test_every_file_on_the_page_exists() -> None:
    for path in re.findall(r"(?:benchmarks|rollouts|services|tests)/[\w/]+\.py", PAGE.text):
        assert (ROOT / path).exists(), path


def test_the_page_names_every_figure_of_a_sync() -> None:
    for key in sync_metrics(0.0, 1.0):
        assert f"`{key}`" in PAGE.text


def test_the_page_and_the_code_prove_the_same_rule() -> None:
    assert window.__doc__ is not None
    for text in (PAGE.text, window.__doc__):
        assert "i < (v + S + 1) P" in text
