"""The guides to the SDPO channel say what is: settings parse, names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import ROOT, Guide, as_a_run, names_in_code

from composer_mesh.actors.teacher_outputs.messages import TeacherHead, make_teacher_output, pack
from composer_mesh.configs.load import load_config
from composer_mesh.configs.sdpo import SdpoConfig

CHANNEL, HINTS = Guide.read("sdpo.md"), Guide.read("sdpo-hints.md")
PAGES = {"sdpo.md": CHANNEL, "sdpo-hints.md": HINTS}
BLOCKS = [block for page in PAGES.values() for block in page.blocks("toml")]
EXAMPLES = {"my_key"}
"""Names that a page makes up."""


@pytest.mark.parametrize("text", BLOCKS, ids=lambda text: text.splitlines()[0])
def test_every_toml_block_is_a_part_of_a_run(text: str) -> None:
    assert as_a_run(text).sdpo.on


def test_the_page_shows_every_key_of_its_section_with_its_default() -> None:
    shown = as_a_run(CHANNEL.blocks("toml")[0]).sdpo
    assert shown == SdpoConfig(alpha=shown.alpha)
    elsewhere = {"hints", "jsd_beta", "temperature", "entropy_opd_h_max"}
    for name in SdpoConfig.model_fields.keys() - elsewhere:
        assert re.search(rf"\b{name}\b", CHANNEL.text), name


@pytest.mark.parametrize(
    "key", ["teacher_output", "top_k_choice", "teacher", "placement", "when_lost"]
)
def test_the_page_names_every_choice(key: str) -> None:
    annotation: Any = SdpoConfig.model_fields[key].annotation
    for choice in annotation.__args__:
        assert re.search(rf'[`"]{choice}\b', CHANNEL.text), choice


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(page: str) -> None:
    assert PAGES[page].names() - names_in_code() - EXAMPLES == set()


@pytest.mark.parametrize("row", ["hidden", "full", "topk", "sampled"])
def test_the_page_tells_the_bytes_that_a_signal_takes(row: str) -> None:
    cells = next(line for line in CHANNEL.text.splitlines() if line.startswith(f"| `{row}` |"))
    told = int(cells.split("|")[4].split()[0].replace(",", ""))
    config = SdpoConfig.model_validate({"alpha": 1.0, "teacher_output": row})
    states, weight = torch.zeros(2, 1024), torch.zeros(32_768, 1024)
    tensors = make_teacher_output(
        config, states, TeacherHead(weight, None), torch.zeros(2, dtype=torch.int64)
    )
    assert pack(tensors)[1].nbytes == 2 * told


def test_every_training_command_is_accepted() -> None:
    lines = re.findall(r"^    (composer-mesh train .+)$", CHANNEL.text, re.MULTILINE)
    for _, _, config, *options in map(shlex.split, lines):
        load_config(Path(config), [each for each in options if each != "--set"])
    assert lines


def test_the_benchmarks_of_the_page_are_there() -> None:
    named = re.findall(r"python (benchmarks/\w+\.py)", CHANNEL.text)
    assert len(named) == 2
    assert all((ROOT / name).is_file() for name in named)
