"""docs/dashboard.md says what the commands and the page do."""

from __future__ import annotations

import re
import shlex

from guides import ROOT, Guide

from composer_mesh.plugins.dashboard.app import MOST_COMPARED, DashboardOptions
from composer_mesh.plugins.dashboard.pages import LONGEST_SHOWN
from composer_mesh.plugins.dashboard.series import MOST_POINTS
from composer_mesh.services.commands.parser import make_parser

PAGE = Guide.read("dashboard.md")
SCRIPT = (ROOT / "plugins" / "dashboard" / "static" / "app.js").read_text()


def test_every_command_of_the_page_is_one() -> None:
    shown = re.findall(r"^    (?:\w+=\S+ )?composer-mesh (.*?)(?:  .*)?$", PAGE.text, re.MULTILINE)
    assert len(shown) == 4
    for command in shown:
        words = [word for word in shlex.split(command) if word != "[RUNS_DIR]"]
        make_parser().parse_args(words)


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"http://127.0.0.1:{DashboardOptions.model_fields['port'].default}/" in PAGE.text
    assert f"up to {MOST_COMPARED} runs" in PAGE.text
    assert f"at most {MOST_POINTS} points" in PAGE.text
    assert f"at most {LONGEST_SHOWN:,} characters" in PAGE.text


def test_every_key_of_the_page_does_something() -> None:
    keys = re.search(r"Everything can be done with the keyboard: .*?all keys", PAGE.text, re.DOTALL)
    assert keys is not None
    for key in re.findall(r"`(\S)`", keys.group()):
        assert key.isdecimal() or re.search(rf'^  ("?){re.escape(key)}\1: ', SCRIPT, re.MULTILINE)
