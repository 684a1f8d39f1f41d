"""docs/tasks.md says what is: its code runs, its commands and options exist, its names too."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from guides import Guide, as_a_run, names_in_code

import composer_mesh
from composer_mesh import SyncSession
from composer_mesh.configs.data import CurriculumConfig
from composer_mesh.configs.teachers import JudgesConfig
from composer_mesh.services.checks.task import ExampleJudges
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.tasks.errors import TaskError
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.task import Task

PAGE = Guide.read("tasks.md")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the python of the page defines, in order."""
    found: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, found)
    return found


def test_the_python_of_the_page_runs_and_each_task_makes_its_tools_and_rewards(
    names: dict[str, Any],
) -> None:
    tasks = [names[name].create() for name in ("Sums", "BigSums", "CountTo", "Graded")]
    assert [len(task.tools) for task in tasks] == [0, 0, 1, 1]
    assert [one.name for one in names["Diverse"].create().group_rewards] == ["different"]
    assert [one.name for one in tasks[-1].rewards] == ["reached", "brief"]
    assert all(task.episode("train", 0).payload for task in tasks)


def test_the_configs_of_the_page_find_their_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text("\n".join(PAGE.blocks("python")[:2]))
    monkeypatch.chdir(tmp_path)
    *blocks, curriculum = (block for block in PAGE.blocks("toml") if "[data" in block)
    for block, name in zip(blocks, ("sums", "big_sums", "mixture"), strict=True):
        task = make_task(as_a_run(block + "\n[replay]\nbeta = 0\n"))
        assert task.name == name
    assert [one.name for one in task.parts] == ["sums", "big_sums"]
    assert getattr(task.parts[1], "largest", None) == 99
    assert as_a_run(curriculum).data.curriculum == CurriculumConfig()


def test_the_judges_of_the_page_are_a_section_and_ask_what_the_page_says(
    names: dict[str, Any],
) -> None:
    (block,) = [block for block in PAGE.blocks("toml") if "[judges" in block]
    judges = JudgesConfig.model_validate(tomllib.loads(block)["judges"])
    assert [one.name for one in judges.models] == ["quality"]
    task = names["Letters"].create()
    task.use_judges(ExampleJudges())
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("no")
        assert session.outcome().rewards == {"correct": 0.0, "helpful": 1.0, "polite": 1.0}


@pytest.mark.plugins
def test_every_command_of_the_page_is_one_with_its_options() -> None:
    lines = re.findall(r"^    composer-mesh (.*?)(?: +#.*)?$", PAGE.text, re.MULTILINE)
    parsed = [make_parser().parse_args(line.split()).command for line in lines]
    assert {"new-task", "play", "check", "train"} <= set(parsed)
    options = {
        f"--{word}"
        for code in PAGE.inline()
        if not code.startswith("nox ")
        for word in re.findall(r"--([a-z-]+)", code)
    }
    known = " ".join(
        one.format_help() for one in make_parser()._subparsers._group_actions[0].choices.values()
    )
    assert {one for one in options if one not in known} == set()


def test_the_methods_of_the_page_are_those_of_the_classes() -> None:
    for method in re.findall(r"^\| `(\w+)\(self", PAGE.text, re.MULTILINE):
        assert hasattr(Session, method) or hasattr(Task, method), method


def test_the_page_imports_public_names_only_and_knows_the_errors_of_tasks() -> None:
    for block in PAGE.blocks("python"):
        assert "from composer_mesh." not in block
    assert set(re.findall(r"`(Session|Transcript|Reply|SyncSession|ToolError)\b", PAGE.text)) <= {
        *composer_mesh.__all__
    }
    assert issubclass(composer_mesh.ToolError, TaskError)


def test_every_name_of_the_page_is_in_the_code() -> None:
    ours = {
        "below_zero",
        "hint_templates",
        "my_task",
        "my_package",
        "my_module",
        "my_file",
        "judged_offers",
    }
    assert PAGE.names() - names_in_code() - ours - {"save_to_disk"} == set()
