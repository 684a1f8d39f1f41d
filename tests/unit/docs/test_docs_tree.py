"""docs/tree.md and docs/supervision.md say what the commands, the config and the code say."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from guides import Guide, names_in_code

from composer_mesh.configs import plugins
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.mesh.failures import FailureClass
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.directory.control import Control

TREE, SUPERVISION = Guide.read("tree.md"), Guide.read("supervision.md")
PAGES = {"tree.md": TREE, "supervision.md": SUPERVISION}


def typed(text: str) -> list[str]:
    """A command as the page shows it, with its optional words, as arguments."""
    words = text.replace("[RUN]", "RUN").replace('"SELECT ..."', "SELECT").split()
    return words[1:]


@pytest.mark.plugins
def test_every_command_of_the_page_is_one() -> None:
    shown = [code for code in TREE.inline() if code.startswith("composer-mesh ")]
    for command in shown:
        make_parser().parse_args(typed(command))
    named = {typed(command)[0] for command in shown}
    others = {
        "make-code-tasks",
        "new-task",
        "serve",
        "serve-env",
        "play",
        "eval",
        "check",
        "explain",
        "presets",
        "verify",
        "dashboard",
        "report",
        "train",
        "ablate",
        "replay",
        "reward",
        "traces",
        "sft",
        "push",
    }
    launching = {"islands", "island-job", "launch", "worker", "stop", "join"}
    assert named == set(plugins.names("commands")) - others - launching


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in TREE.blocks("python"):
        exec(block, names)

    async def resize(generator: int) -> dict[str, dict[str, int]]:
        return {"generator": {"before": 1, "after": generator}}

    async def whole() -> None:
        async with Control(tmp_path, {"scale": resize}):
            await asyncio.to_thread(names["grow"], tmp_path)

    asyncio.run(whole())


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_a_page_is_in_the_code(page: str) -> None:
    missing = PAGES[page].names() - names_in_code()
    assert {name for name in missing if not name.startswith("run_")} == set()


def test_the_settings_are_those_of_the_config_with_their_values() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", SUPERVISION.text, re.MULTILINE)
    assert {name: float(value) for name, value in rows} == SupervisionConfig().model_dump()


def test_the_classes_are_those_of_the_code() -> None:
    for one in FailureClass:
        assert f"| `{one.value}` |" in SUPERVISION.text
