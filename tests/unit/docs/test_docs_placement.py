"""docs/placement.md shows what check prints, and a section that is one."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest
from guides import ROOT, Guide

from composer_mesh.configs.placement import KINDS, PlacementConfig
from composer_mesh.services.cli import main

PAGE = Guide.read("placement.md")
ROWS = "".join(f'{{"question": "{n}+1?", "answer": "#### {n + 1}"}}\n' for n in range(20))


def test_the_section_of_the_page_is_one_and_every_kind_is_named() -> None:
    block, shared = PAGE.blocks("toml")
    section = PlacementConfig.model_validate(tomllib.loads(block)["placement"])
    assert (section.gpus("trainer"), section.hosts[0].names) == (1, ("node",))
    assert all(kind in block for kind in KINDS)
    assert PlacementConfig.model_validate(tomllib.loads(shared)["placement"]).colocate


@pytest.mark.parametrize("block", PAGE.blocks("console"))
def test_check_prints_what_the_page_shows(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *lines = block.splitlines()
    (tmp_path / "FILE.jsonl").write_text(ROWS)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    status = main(shlex.split(command)[2:])
    shown = capsys.readouterr()
    refused = lines[0] != "..."
    assert status == (2 if refused else 0)
    found = shown.err if refused else shown.out[shown.out.index("placement (memory") :]
    expected = lines if refused else lines[1:]
    assert [line.rstrip() for line in found.rstrip().splitlines()] == expected
