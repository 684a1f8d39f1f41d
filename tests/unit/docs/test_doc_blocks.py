"""Each code block of the README, of docs/ and of the examples is what a reader can use.

Python runs here or in the test that `RUN_ELSEWHERE` names, TOML is a part of a config, command
lines are accepted by the parser, and what they name exists.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_blocks import Block, blocks, commands
from guides import as_a_run
from repository import ROOT
from selection import suites

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.commands.parser import make_parser

RUN_ELSEWHERE = {
    "docs/areal.md": "plugins/frameworks/unit/test_areal.py",
    "docs/channels.md": "unit/channels/test_foreign_channel.py",
    "docs/composer-replication.md": "plugins/frameworks/unit/test_composer_replication.py",
    "docs/python.md": "procs/test_python_runs.py",
    "docs/replay.md": "unit/docs/test_docs_replay.py",
    "docs/service.md": "procs/runs/test_service_guide.py",
    "docs/store.md": "unit/docs/test_docs_store.py",
    "docs/tree.md": "unit/docs/test_docs_tree.py",
    "docs/trl.md": "plugins/frameworks/unit/test_docs_trl.py",
    "docs/verl.md": "plugins/frameworks/unit/test_verl.py",
}
"""The test below tests/ that runs the Python of a page, which needs what that test sets up."""
MOST_NOT_RUN = 12
LOADED = {"check", "train", "sft", "eval", "ablate", "launch"}
"""Commands whose config and `--set` are resolved here."""


def of(*languages: str) -> list[Block]:
    return [one for one in blocks() if one.language in languages and not one.not_run]


PYTHON = sorted({one.page for one in of("python")} - RUN_ELSEWHERE.keys())
COMMANDS = [pytest.param(words, id=f"{block}-{' '.join(words[:2])}") for block, words in commands()]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PYTHON)
@pytest.mark.usefixtures("scratch")
def test_the_python_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in (one for one in of("python") if one.page == page):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(block.text, str(block), "exec", flags=flags, dont_inherit=True)
        if inspect.iscoroutine(running := eval(code, names)):
            asyncio.run(running)


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_a_page_that_is_not_run_here_is_run_by_the_test_that_is_named(page: str, test: str) -> None:
    text = (ROOT / "tests" / test).read_text(encoding="utf-8")
    assert Path(page).name in text
    assert re.search(r'blocks\("python"\)|```python', text)
    assert {one.page for one in of("python")} >= {page}


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "python"], ids=str)
def test_python_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_a_part_of_a_config(block: Block) -> None:
    as_a_run(block.text)


@pytest.mark.parametrize("block", of("json", "yaml"), ids=str)
def test_data_is_what_it_is_called(block: Block) -> None:
    assert {"json": json.loads, "yaml": yaml.safe_load}[block.language](block.text)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_line_is_accepted_and_names_what_exists(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    {"composer-mesh": ours, "make": targets, "nox": sessions, "pip": extras}.get(words[0], script)(
        words
    )
    for path in (path for word in words for path in re.findall(r"configs/[\w.-]+\.toml", word)):
        assert (ROOT / path).is_file(), f"there is no {path}"


def ours(words: list[str]) -> None:
    """Parse a line of `composer-mesh`, and resolve its config."""
    arguments = make_parser(words[1]).parse_args(words[1:])
    config = getattr(arguments, "config", None)
    if words[1] in LOADED and isinstance(config, Path) and (ROOT / config).is_file():
        assert isinstance(load_config(ROOT / config, arguments.set, files_gone=True), Config)


def targets(words: list[str]) -> None:
    """Find each target of `make`, but for placeholders."""
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    heads = re.findall(r"^([\w -]+):", rules, re.MULTILINE)
    known = {name for head in heads for name in head.split()}
    patterns = re.findall(r"^([\w-]*)%:", rules, re.MULTILINE)
    for target in words[1:]:
        found = target in known or any(target.startswith(one) for one in patterns)
        assert found or "=" in target or target.isupper() or target == "test-NAME", target


def sessions(words: list[str]) -> None:
    """Find the session of `nox -s`: a product, or one of those next to the tests."""
    if "-s" not in words:
        return
    name = words[words.index("-s") + 1]
    text = "".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("nox_sessions.py"))
    named = rf'def {name.replace("-", "_")}\b|"{name}"'
    assert name in suites() or name.isupper() or re.search(named, text), name


def extras(words: list[str]) -> None:
    """Find the extras that `pip` is to install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"(?:composer-mesh|\.)\[([\w,-]+)\]", " ".join(words))
    for extra in (one for names in named for one in names.split(",")):
        assert extra in project["optional-dependencies"], extra


def script(words: list[str]) -> None:
    """Find the file that `python` runs."""
    for word in words[1:]:
        if word.startswith(("benchmarks/", "tests/", "examples/")):
            assert (ROOT / word).exists(), word


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [f"{one}: {one.not_run}" for one in blocks() if one.not_run]
    assert len(left_out) <= MOST_NOT_RUN, "\n".join(left_out)


def test_every_kind_of_block_is_known() -> None:
    known = {"", "python", "toml", "json", "yaml", "sh", "console", "text", "sql"}
    assert {one.language for one in blocks()} <= known
    assert len(blocks()) > 200
    assert sys.version_info >= (3, 11)
