"""The page about weights: its code runs, and its settings are those that exist."""

from __future__ import annotations

import re
from typing import Any

import torch
from guides import ROOT, Guide
from torch import nn

from composer_mesh.configs.weights import WeightsConfig

PAGE = Guide.read("weight-sync.md")


async def test_the_round_on_the_page_brings_the_weights_over() -> None:
    [block] = PAGE.blocks("python")
    names: dict[str, Any] = {}
    exec(block, names)
    model, served = nn.Linear(3, 2), nn.Linear(3, 2)
    assert await names["one_round"](model, served, 4) == 4
    assert torch.equal(model.weight, served.weight)


def test_the_page_names_every_setting_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.text.split("| `[weights]` |")[1], re.M))
    assert rows.keys() >= WeightsConfig.model_fields.keys()
    assert rows["transport"] == f'`"{WeightsConfig().transport}"`'
    assert rows["checksums"] == f"`{str(WeightsConfig().checksums).lower()}`"


def test_every_file_on_the_page_exists() -> None:
    for path in re.findall(r"`((?:mesh|benchmarks)/[\w/]+\.py)`", PAGE.text):
        assert (ROOT / path).is_file(), path
