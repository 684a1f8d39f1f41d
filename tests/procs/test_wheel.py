"""The built wheel in an environment of its own: commands in a folder outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest
from live_run import SHORT, wait_until
from repository import ROOT
from strangers import Environment

pytestmark = [pytest.mark.timeout(1200), pytest.mark.plugins]
LONGEST_S = 600
DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy: setuptools leaves its files next to the sources."""
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, source)
    (built,) = place.glob("composer_mesh-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    made = Environment.make(folder, folder)
    pip("--python", folder / "bin/python", "install", "-q", "--no-deps", "--no-index", wheel)
    return made


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def settings(policy_cache: Path) -> list[str]:
    values = {**SHORT, "policy.cache_dir": policy_cache}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def place(
    installed: Environment, policy_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder outside the repository in which the quickstart was trained."""
    folder = tmp_path_factory.mktemp("empty")
    done = installed.run("train", "quickstart", *settings(policy_cache), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    for package, patterns in DATA.items():
        folder = ROOT / "src" / package.replace(".", "/")
        for pattern in patterns:
            found = list(folder.glob(pattern))
            assert found
            shipped = {str(path.relative_to(ROOT / "src")) for path in found if path.is_file()}
            assert shipped <= names


def test_it_is_imported_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    script = "import composer_mesh; print(composer_mesh.__file__, composer_mesh.Config.__module__)"
    python = str(installed.folder / "bin/python")
    found = subprocess.run(
        [python, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(installed.packages)), found.stdout + found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "train and evaluate a run"),
        (["presets"], "quickstart"),
        (["check", "quickstart"], "placement (memory in GB: estimated / available)"),
        (["explain", "trainer.lr"], "trainer.lr: number, above 0"),
        (["tree", "runs/quickstart"], ""),
        (["events", "runs/quickstart"], "run_finished"),
        (["traces", "runs/quickstart"], "toolbox train"),
        (["verify", "runs/quickstart"], "runs/quickstart"),
        (
            ["replay", "runs/quickstart", "--output", "pairs.jsonl", "--dry-run"],
            "what it would cost",
        ),
        (["eval", "quickstart", "--policy", "gold", "--set", "eval.episodes=2"], "100.0%"),
        (["report", "runs/quickstart"], "wrote report.html"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_a_command_works_outside_the_repository(
    words: list[str], said: str, installed: Environment, place: Path
) -> None:
    done = installed.run(*words, cwd=place)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if words[0] == "tree" else 0), done.stderr
    assert said in done.stdout


def test_a_new_task_is_played_and_checked(installed: Environment, place: Path) -> None:
    assert installed.run("new-task", "my_task", cwd=place).returncode == 0
    for words in (["play", "config.toml", "--scripted", "expert"], ["check", "config.toml"]):
        done = installed.run(*words, cwd=place / "my_task")
        assert done.returncode == 0, done.stderr


def test_a_copied_preset_is_a_config(installed: Environment, tmp_path: Path) -> None:
    assert installed.run("presets", "--copy", "quickstart", cwd=tmp_path).returncode == 0
    assert installed.run("check", "quickstart.toml", cwd=tmp_path).returncode == 0
    assert installed.run("check", "configs/quickstart.toml", cwd=tmp_path).returncode == 2


def test_the_dashboard_serves_its_page_script_and_style(
    installed: Environment, place: Path
) -> None:
    with serving(installed, place) as url, httpx.Client(base_url=url, timeout=60) as client:
        page = client.get("/runs/quickstart/")
        assert page.status_code == 200
        assert "quickstart" in page.text
        for file in ("app.js", "style.css", "icon.svg"):
            assert f"/static/{file}" in page.text
            assert client.get(f"/static/{file}").status_code == 200


@contextmanager
def serving(installed: Environment, place: Path) -> Iterator[str]:
    """The dashboard's address, while it runs."""
    said = place / "dashboard.txt"
    command = [str(installed.folder / "bin/composer-mesh"), "dashboard", "runs", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with said.open("w") as out:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: "http://" in said.read_text(), "address", LONGEST_S)
        yield next(word for word in said.read_text().split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait(LONGEST_S)


def test_the_summary_of_the_run_is_there(place: Path) -> None:
    summary = json.loads((place / "runs/quickstart/summary.json").read_text())
    assert summary["steps"] == SHORT["run.steps"]
