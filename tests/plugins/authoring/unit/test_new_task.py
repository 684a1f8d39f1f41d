"""A new task is a package that runs at once, and is never written over something else."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.mesh.environment import IMPORT_PATHS, SAFE_PATH
from composer_mesh.plugins.authoring.new_task import TEMPLATE, template_files
from composer_mesh.rollouts.hints import TEMPLATES
from composer_mesh.services.cli import main
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.playing import conversations

NAME = "a_new_shop"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a new task, as working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(IMPORT_PATHS, "/elsewhere")
    monkeypatch.chdir(tmp_path)
    assert main(["new-task", NAME]) == 0
    monkeypatch.chdir(tmp_path / NAME)
    importlib.invalidate_caches()
    yield tmp_path / NAME
    for name in [one for one in sys.modules if one.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_the_files_of_a_new_task_are_those_of_the_template_with_its_name(project: Path) -> None:
    written = {str(one.relative_to(project)) for one in project.rglob("*") if one.is_file()}
    assert written == {
        *("README.md", "config.toml", "pyproject.toml", "tests/test_task.py"),
        *(f"{NAME}/__init__.py", f"{NAME}/task.py"),
    }
    for one in written:
        assert "$" not in (project / one).read_text(encoding="utf-8"), one


def test_the_template_is_installed_with_the_package() -> None:
    """Its files match the patterns of package-data, which are what an installation has."""
    patterns = ("template/*.template", "template/*/*.template")
    folder = ROOT / "plugins" / "authoring"
    found = {one for pattern in patterns for one in folder.glob(pattern)}
    assert {
        one for one in folder.rglob("*") if one.is_file() and one.suffix == ".template"
    } == found
    assert len(dict(template_files(TEMPLATE))) == len(found)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{pattern}"' in text for pattern in patterns)


def test_the_tests_of_a_new_task_pass(project: Path) -> None:
    command = [sys.executable, "-m", "unittest", "tests/test_task.py"]
    environ = {name: value for name, value in os.environ.items() if name != SAFE_PATH}
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 4 tests" in done.stderr


def test_the_config_of_a_new_task_passes_check_with_a_dry_episode_by_its_expert(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "config.toml"]) == 0
    said = "task 'shop_task': a dry episode by its expert took 4 turns, reward 1, a success"
    assert said in capsys.readouterr().out


def test_a_warm_start_from_a_new_task_shows_its_own_hints(
    project: Path, rng: random.Random
) -> None:
    assert main(["check", "config.toml"]) == 0  # from here on the package is importable
    config = load_config(Path("config.toml"))
    wrong = {"demonstrations": 40, "error_rate": 1.0, "hinted_share": 1.0}
    settings = config.policy.warm_start.model_copy(update=wrong)
    talks = conversations(make_task(config), settings, rng)
    hints = {text for talk in talks for kind, text in talk if kind == "hint"}
    assert any(text.startswith("Hint: There is no") for text in hints)
    assert "unknown_item" not in TEMPLATES


def test_the_sources_of_a_new_task_pass_the_linter_of_this_repository(project: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for words in (["check", "--ignore", "I001,PT009,RUF012"], ["format", "--check"]):
        done = subprocess.run(
            [str(ruff), *words, *config, NAME, "tests"],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_task_touches_public_names_only(project: Path) -> None:
    for one in (project / NAME / "task.py", project / "tests" / "test_task.py"):
        assert "composer_mesh." not in one.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My-Task", "lower-case letters"),
        ("_mine", "lower-case letters"),
        ("mine_", "lower-case letters"),
        ("../up", "lower-case letters"),
        ("a" * 51, "at most 50"),
        ("class", "no keyword"),
        ("$name", "lower-case letters"),
        ("json", "standard library"),
        ("pydantic", "installed here"),
        ("composer_mesh", "installed here"),
        ("tests", "another folder of the project"),
    ],
)
def test_a_name_that_no_package_can_have_is_refused(
    name: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-task", name]) == 2
    said = capsys.readouterr().err
    assert f"NAME is {name!r}" in said
    assert why in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for place in ("taken", "link", "taken/file"):
        assert main(["new-task", "a_task", "--output", place]) == 2
        assert "must be new or an empty folder" in capsys.readouterr().err
    assert [one.name for one in (tmp_path / "taken").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    assert main(["new-task", "a_task", "--output", "empty"]) == 0
    assert (tmp_path / "empty" / "a_task" / "task.py").is_file()
