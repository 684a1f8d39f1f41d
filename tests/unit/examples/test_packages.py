"""The tasks and workflows of the packages outside the tree are sound."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from composer_mesh import JudgeQuestion, JudgeReply, SyncSession, Task
from composer_mesh.configs.load import load_config
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import make_task, make_workflow

PACKAGES = sorted(path.parents[1] for path in (ROOT / "examples").glob("*/*/__init__.py"))
NAMES = [package.name for package in PACKAGES]


@pytest.fixture(params=PACKAGES, ids=NAMES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package, which can be imported."""
    folder: Path = request.param
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_its_task_can_be_solved_by_its_own_expert(package: Path, tmp_path: Path) -> None:
    task = task_of(package, tmp_path)
    for split in ("train", "heldout"):
        for index in range(20):
            session = SyncSession(task, task.episode(split, index))  # type: ignore[arg-type]
            while not session.step(task.expert(session.messages)).done:
                pass
            assert session.outcome().success


def test_its_workflow_can_be_made(package: Path) -> None:
    settings = [f"data.path={__file__}"] if "parquet" in package.name else []
    config = load_config(package / "config.toml", settings)
    if config.rollouts.workflow is None:
        return
    if "third_party" in package.name and importlib.util.find_spec("agents") is None:
        with pytest.raises(UnusableTask, match="No module named 'agents'"):
            make_workflow(config)
        return
    assert make_workflow(config) is not None


def test_a_wrong_action_of_its_task_differs_from_the_right_one(
    package: Path, tmp_path: Path
) -> None:
    task = task_of(package, tmp_path)
    for index in range(20):
        messages = SyncSession(task, task.episode("train", index)).messages
        assert task.corrupted(messages, random.Random(index)) != task.expert(messages)


def task_of(package: Path, folder: Path) -> Task:
    """The task of a package's config, with the rows that the package makes."""
    settings: list[str] = []
    if (package / package.name / "make_rows.py").exists():
        rows: Any = importlib.import_module(f"{package.name}.make_rows")
        rows.write_rows(folder / "rows.parquet")
        settings = [f"data.path={folder / 'rows.parquet'}"]
    task = make_task(load_config(package / "config.toml", settings))
    if (package / package.name / "judge.py").exists():
        task.use_judges(OwnJudge(importlib.import_module(f"{package.name}.judge")))
    return task


class OwnJudge:
    """The judge of a package, asked without HTTP."""

    def __init__(self, judge: Any) -> None:
        self._judge = judge

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        return JudgeReply(json.dumps(self._judge.graded(question.messages[1]["content"])))
