"""The packages outside the tree use public names alone, and their configs and tasks are sound."""

from __future__ import annotations

import ast
import importlib
import random
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import composer_mesh
from composer_mesh import SyncSession, Task
from composer_mesh.configs.load import load_config
from composer_mesh.tasks.loading import make_task, make_workflow

PACKAGES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]


@pytest.fixture(params=PACKAGES, ids=NAMES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package, which can be imported."""
    folder: Path = request.param
    monkeypatch.syspath_prepend(str(folder))
    return folder


def imported(path: Path) -> list[str]:
    """Everything that a file imports from the service, as module.name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [f"{node.module}.{one.name}" for one in node.names]
    return [name for name in found if name.split(".")[0] == "composer_mesh"]


def test_a_package_imports_public_names_alone(package: Path) -> None:
    public = {f"composer_mesh.{name}" for name in composer_mesh.__all__}
    for path in package.rglob("*.py"):
        assert set(imported(path)) <= public, path


def test_its_task_can_be_solved_by_its_own_expert(package: Path, tmp_path: Path) -> None:
    task = task_of(package, tmp_path)
    if not task.has_expert:
        pytest.skip(f"the task of {package.name} has no expert")
    for split in ("train", "heldout"):
        for index in range(20):
            session = SyncSession(task, task.episode(split, index))  # type: ignore[arg-type]
            while not session.step(task.expert(session.messages)).done:
                pass
            assert session.outcome().success


def test_a_wrong_action_of_its_task_differs_from_the_right_one(
    package: Path, tmp_path: Path
) -> None:
    task = task_of(package, tmp_path)
    if not task.has_expert:
        pytest.skip(f"the task of {package.name} has no expert")
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
    config = load_config(package / "config.toml", settings)
    assert config.rollouts.workflow is None or make_workflow(config) is not None
    return make_task(config)
