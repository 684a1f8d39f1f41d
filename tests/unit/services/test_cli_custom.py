"""Custom functions on the command line: found in folders that are named, or refused in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repetition import LONG
from repository import ROOT

from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.services.cli import main

QUICKSTART = ROOT / "configs" / "quickstart.toml"
GOOD = """
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

a_number = 3


def loss(inputs: LossInputs, scale: float = 1.0) -> LossOutputs:
    return LossOutputs(loss=scale * inputs.trainer_logprobs.sum(), metrics={})


def advantage(inputs, scale: float = 1.0):
    raise AssertionError("nothing is called before a run")


async def later(inputs):
    return None
"""
BROKEN = "raise RuntimeError('this module cannot be imported')\n"
HERE = 'run.import_paths=["."]'
MODULES = {"users_functions.py": GOOD, "users_mistake.py": BROKEN}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's modules, in an interpreter that forgets them again."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(IMPORT_PATHS, "/elsewhere")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def overrides(section: str, path: str, *more: str) -> list[str]:
    settings = (f"{section}.type=custom", f"{section}.import_path={path}", HERE, *more)
    return [part for setting in settings for part in ("--set", setting)]


REFUSED = {
    "missing module": ("users_nothing.loss", [], "there is no module 'users_nothing'"),
    "missing function": ("users_functions.lost", [], "has no 'lost': did you mean"),
    "module that fails": ("users_mistake.loss", [], "this module cannot be imported"),
    "no function": ("users_functions.a_number", [], "it is of type int: name a function"),
    "coroutine": ("users_functions.later", [], "write def, not async def"),
    "no path": ("users_functions", [], "it is no import path"),
    "wrong arguments": ("users_functions.loss", ["kwargs.skale=2.0"], "skale=2.0"),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("section", ["loss", "advantage"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_cannot_serve_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, section: str, name: str
) -> None:
    path, more, words = REFUSED[name]
    more = [f"{section}.{setting}" for setting in more]
    assert main([command, str(QUICKSTART), *overrides(section, path, *more)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"composer-mesh: custom function {path!r}: ")
    assert said.err.count("composer-mesh:") == said.err.count("\n") == 1
    assert words in said.err
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == MODULES.keys()


def test_the_working_directory_is_no_import_path_unless_it_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "random.py").write_text(BROKEN)
    given = overrides("loss", "users_functions.loss", "run.import_paths=[]")
    assert main(["check", str(QUICKSTART), *given]) == 2
    said = capsys.readouterr().err
    assert "there is no module 'users_functions'" in said
    assert "run.import_paths" in said


@LONG
def test_a_users_folder_hides_no_other_module(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "inspect.py").write_text(BROKEN)
    code = (
        "import sys; from composer_mesh.services.cli import main; "
        f"sys.exit(main(['check', {str(QUICKSTART)!r}, "
        f"*{overrides('loss', 'users_functions.loss')!r}]))"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_functions_of_a_named_folder_are_accepted_and_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = overrides("loss", "users_functions.loss", "loss.kwargs={scale=2.0}")
    advantage = overrides("advantage", "users_functions:advantage", "advantage.kwargs.scale=3.0")
    assert main(["check", str(QUICKSTART), *loss, *advantage]) == 0
    out = capsys.readouterr().out
    assert 'import_path = "users_functions.loss"' in out
    assert 'import_path = "users_functions:advantage"' in out
    assert "scale = 2.0" in out
    assert "scale = 3.0" in out


def test_the_processes_of_the_run_find_them_too_and_keep_what_they_found_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["check", str(QUICKSTART), *overrides("loss", "users_functions.loss")]) == 0
    capsys.readouterr()
    assert os.environ[IMPORT_PATHS].split(os.pathsep) == ["/elsewhere", str(folder)]
    assert sys.path.count(str(folder)) == 1
    assert sys.path[-1] == str(folder)


def test_without_custom_functions_import_paths_stay_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.path)
    assert main(["check", str(QUICKSTART)]) == 0
    capsys.readouterr()
    assert sys.path == before
    assert os.environ[IMPORT_PATHS] == "/elsewhere"


@LONG
def test_looking_functions_up_starts_no_monarch(tmp_path: Path) -> None:
    (tmp_path / "users_functions.py").write_text(GOOD)
    commands = [
        ["check", str(QUICKSTART), *overrides("loss", f"users_functions.{name}")]
        for name in ("loss", "lost")
    ]
    code = (
        "import sys, json; from composer_mesh.services.cli import main; "
        f"statuses = [main(command) for command in {commands!r}]; "
        "print(json.dumps([statuses, sorted(sys.modules)]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0, 2]
    assert "torch" in modules
    assert not {"monarch", "transformers", "prime_rl"} & set(modules)


def test_a_workflow_that_is_not_there_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(QUICKSTART), "--set", "rollouts.workflow=nowhere:Flow"]) == 2
    said = capsys.readouterr().err
    assert "rollouts.workflow is 'nowhere:Flow', but there is no module 'nowhere'" in said
