"""docs/traces.md says what the command line, the store and the exports say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from guides import Guide

from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.traces.list_page import WIDE
from composer_mesh.services.traces.options import SHOWN, SORT_KEYS, read_options

PAGE = Guide.read("traces.md")


def shown() -> list[str]:
    return [code for code in PAGE.inline() if code.startswith("composer-mesh ")]


def test_every_command_of_the_page_is_one() -> None:
    commands = [code for code in shown() if code != "composer-mesh replay"]
    assert len(commands) == 5
    for command in commands:
        arguments = make_parser().parse_args(command.split()[1:])
        if arguments.command == "traces":
            read_options(arguments)


def test_every_option_of_the_page_is_one() -> None:
    (traces, train) = (
        make_parser().parse_args(words) for words in (["traces", "RUN"], ["train", "CONFIG"])
    )
    known = {*vars(traces), *vars(train)}
    for option in {word for code in PAGE.inline() for word in re.findall(r"--([a-z-]+)", code)}:
        assert option.replace("-", "_") in known, option


def test_the_numbers_and_the_keys_of_the_page_are_those_of_the_code() -> None:
    assert f"a list; {SHOWN} rollouts" in PAGE.text
    assert f"A page of {WIDE} columns and more" in PAGE.text
    (row,) = re.findall(r"^\| `--sort KEY`.*$", PAGE.text, re.MULTILINE)
    assert [key for key in re.findall(r"`(\w+)`", row) if key in SORT_KEYS][:6] == list(SORT_KEYS)


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, names)
    pq.write_table(pa.table({"reward": [0.0, 1.0]}), tmp_path / "traces.parquet")
    assert names["mean_reward"](tmp_path) == pytest.approx(0.5)
