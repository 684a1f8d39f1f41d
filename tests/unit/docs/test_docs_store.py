"""The page on the store: its names exist, and its code runs on a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from guides import Guide
from stored_runs import short_run

from composer_mesh.services.cli import main

PAGE = Guide.read("store.md")


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_config: Any) -> Path:
    """A working directory with the run that the page names."""
    await short_run(tmp_path / "runs" / "quickstart", build_config())
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_the_block_of_python_reads_a_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = PAGE.blocks("python")
    names: dict[str, Any] = {}
    exec(compile(block, "docs/store.md", "exec"), names)
    assert len(names["rollouts"]) == 2
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [f"train-{n:06d}-000" for n in range(3)]


async def test_every_command_of_the_page_can_be_typed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = re.findall(r"^    composer-mesh (verify .+?)(?:  #.*)?$", PAGE.text, re.MULTILINE)
    assert [main(shlex.split(line)) for line in lines] == [0, 0]
