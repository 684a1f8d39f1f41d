"""The command line is light until a config is accepted, and never overwrites a run.

Custom functions are found in folders that are named, or refused in a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repetition import LONG, repeated
from repository import ROOT

from composer_mesh.mesh.environment import IMPORT_PATHS, python_module
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import (
    RunDirectoryError,
    claimed,
    refuse_a_used,
    set_aside,
)

QUICKSTART = ROOT / "configs" / "quickstart.toml"


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules of a fresh interpreter that ran one command."""
    code = (
        "import sys, json; from composer_mesh.services.cli import main; "
        f"main({list(arguments)!r}); "
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_check_loads_neither_torch_nor_monarch() -> None:
    loaded = modules_after("check", str(QUICKSTART))
    assert "pydantic" in loaded
    assert not loaded & {"torch", "monarch", "transformers", "numpy"}


def test_a_refused_train_loads_neither_torch_nor_monarch() -> None:
    loaded = modules_after("train", str(QUICKSTART), "--set", "sdpo.alpha=-1")
    assert not loaded & {"torch", "monarch", "transformers", "numpy"}


def test_check_prints_the_run_its_actors_and_its_transports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(QUICKSTART), "--all", "--set", "sdpo.alpha=0"]) == 0
    out = capsys.readouterr().out
    assert 'name = "quickstart"' in out
    assert "alpha = 0" in out
    assert "sdpo: weight 0, off" in out
    assert (
        "weights: trainer -> generator: shared memory: trainer and receivers share one host" in out
    )
    assert "teacher_replay" in out


def test_check_prints_what_differs_from_the_defaults_on_one_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(QUICKSTART), "--set", "sdpo.alpha=0"]) == 0
    out = capsys.readouterr().out
    assert 'run                 name = "quickstart", steps = 70' in out
    assert 'replay.teachers[2]  kind = "builtin", name = "hasty", error_rate = 0.08' in out
    assert "channels and their weights: policy 1, sdpo off, replay 0.05" in out
    assert "grad_clip" not in out, "it has its default"
    assert out.count("\n") < 60


def test_check_creates_no_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(QUICKSTART)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_module_runs_as_the_script_does() -> None:
    command = [sys.executable, "-m", "composer_mesh", "--version"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_resume_without_a_run_is_refused_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(QUICKSTART), "--resume"]) == 2
    assert "--resume runs/quickstart holds no run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_replay_of_a_directory_without_rollouts_is_refused_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(QUICKSTART), "--from-traces", "nowhere"]) == 2
    assert "--from-traces nowhere has no run.sqlite" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("both", [["--resume", "--rollout-only"], ["--resume", "--from-traces=x"]])
def test_half_a_run_is_not_resumed(both: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(QUICKSTART), *both])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_teacher_whose_key_is_not_set_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    teacher = (
        'name = "far"\nkind = "openai"\nbase_url = "https://teacher.invalid/v1"\nmodel = "m"\n'
        'api_key_env = "A_KEY_THAT_IS_NOT_SET"\n'
        "prompt_usd_per_million = 0\ncompletion_usd_per_million = 0\n"
    )
    text = QUICKSTART.read_text().replace("\n[eval]", f"\n[[replay.teachers]]\n{teacher}\n[eval]")
    config.write_text(text)
    assert main(["check", str(config)]) == 2
    assert "A_KEY_THAT_IS_NOT_SET" in capsys.readouterr().err
    assert main(["check", str(config), "--set", "replay.beta=0"]) == 0


def test_an_output_that_holds_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main(["train", str(QUICKSTART), "--output", str(tmp_path)]) == 2
    assert f"--output {tmp_path} already holds a run" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["train", str(QUICKSTART), "--output", str(tmp_path / "file")]) == 2
    assert "must be a directory" in capsys.readouterr().err


def test_earlier_runs_move_aside_and_keep_their_order(tmp_path: Path) -> None:
    output = tmp_path / "quickstart"
    for number in (1, 2):
        output.mkdir()
        (output / "metrics.jsonl").write_text(str(number))
        assert set_aside(output) == tmp_path / f"quickstart.{number}"
        assert not output.exists()
    assert (tmp_path / "quickstart.1" / "metrics.jsonl").read_text() == "1"


def test_a_directory_without_a_run_stays_where_it_is(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None
    assert set_aside(tmp_path / "new") is None
    refuse_a_used(tmp_path)


def test_a_run_that_is_being_written_is_neither_moved_nor_shared(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with claimed(output):
        (output / "metrics.jsonl").touch()
        with pytest.raises(RunDirectoryError, match="takes one run at a time"):
            set_aside(output)
        with pytest.raises(RunDirectoryError, match="wait for it"), claimed(output):
            pass
    assert set_aside(output) == tmp_path / "run.1"


@pytest.mark.parametrize("place", ["", "  ", "n" * 300, "a/" * 2000, "é" * 120])
@pytest.mark.parametrize(
    "command",
    [
        ["train", str(QUICKSTART), "--output"],
        ["launch", str(QUICKSTART), "--output"],
        ["eval", str(QUICKSTART), "--output"],
        ["replay", "x", "--output"],
        ["traces", "x", "--output"],
    ],
    ids=lambda words: words[0],
)
def test_a_place_that_no_run_can_have_is_refused(
    command: list[str],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*command, place])
    assert "place" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["train", "a\udcff.toml"], ["traces", "run", "show", "x\udcff"]])
def test_an_argument_that_is_not_utf_8_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not UTF-8, in which a run stores every name" in line


@pytest.mark.parametrize("words", repeated([["train", "none.toml"], ["eval", "none"], ["worker"]]))
def test_too_few_open_files_are_refused_before_anything_starts(words: list[str]) -> None:
    limited = ["bash", "-c", 'ulimit -n 64 && exec "$@"', "bash", *python_module("composer_mesh")]
    done = subprocess.run([*limited, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        f"composer-mesh: {words[0]} needs 256 open files, but this shell allows 64: raise it with "
        "`ulimit -n 256`, or in the limits of the service or the container"
    )


def test_a_soft_limit_of_open_files_is_raised_to_what_a_command_needs() -> None:
    code = (
        "from resource import *; from composer_mesh.services.checks.accepting import *; "
        "setrlimit(RLIMIT_NOFILE, (64, 4096)); allow_open_files('train'); "
        "print(*getrlimit(RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["256", "4096"]


GOOD = """
import torch
from composer_mesh import AdvantageOutputs
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

a_number = 3


def loss(inputs: LossInputs, scale: float = 1.0) -> LossOutputs:
    return LossOutputs(loss=scale * inputs.trainer_logprobs.sum(), metrics={})


def advantage(inputs, scale: float = 1.0):
    rewards = [[one["reward"] * scale for one in group] for group in inputs.rollouts]
    return AdvantageOutputs(advantages=torch.tensor(rewards))


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
    "no path": ("users_functions", [], "it is not an import path"),
    "wrong arguments": ("users_functions.loss", ["kwargs.skale=2.0"], "skale=2.0"),
}


@pytest.mark.parametrize(
    ("command", "section", "name"),
    [
        *(("check", "loss", name) for name in REFUSED),
        ("train", "advantage", "wrong arguments"),
        ("train", "loss", "module that fails"),
    ],
)
def test_a_function_that_cannot_serve_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, section: str, name: str
) -> None:
    path, more, words = REFUSED[name]
    more = [f"{section}.{setting}" for setting in more]
    assert main([command, str(QUICKSTART), *overrides(section, path, *more)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    *frame, message = said.err.removeprefix("composer-mesh: ").splitlines()
    assert len(frame) == (2 if name == "module that fails" else 0)
    assert message.startswith(f"custom function {path!r}: ")
    assert words in message
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


def test_functions_of_a_named_folder_are_shown_and_found_by_the_processes_of_the_run_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = overrides("loss", "users_functions.loss", "loss.kwargs={scale=2.0}")
    advantage = overrides("advantage", "users_functions:advantage", "advantage.kwargs.scale=3.0")
    before = [*sys.path]
    assert main(["check", str(QUICKSTART), *loss, *advantage]) == 0
    out = capsys.readouterr().out
    assert 'import_path = "users_functions.loss"' in out
    assert 'import_path = "users_functions:advantage"' in out
    assert "scale = 2.0" in out
    assert "scale = 3.0" in out
    assert main(["check", str(QUICKSTART), *overrides("loss", "users_functions.loss")]) == 0
    capsys.readouterr()
    assert os.environ[IMPORT_PATHS].split(os.pathsep) == ["/elsewhere", str(folder)]
    assert sys.path[: len(before)] == before
    assert sys.path.count(str(folder)) == 1


def test_without_custom_functions_import_paths_stay_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(QUICKSTART)]) == 0
    before = list(sys.path)
    assert main(["check", str(QUICKSTART)]) == 0
    capsys.readouterr()
    assert sys.path == before
    assert str(folder) not in sys.path
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
    assert not {"torch", "monarch", "transformers", "prime_rl"} & set(modules)


def test_a_workflow_refuses_a_task_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "picky.py"
    lines = (
        "from composer_mesh import Workflow",
        "class Picky(Workflow):",
        "    def check_task(self, task): raise ValueError(f'no {task.name} here')",
    )
    file.write_text("\n".join(lines))
    assert main(["check", str(QUICKSTART), "--set", f"rollouts.workflow={file}:Picky"]) == 2
    assert "no toolbox here" in capsys.readouterr().err


def test_a_workflow_that_is_not_there_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(QUICKSTART), "--set", "rollouts.workflow=nowhere:Flow"]) == 2
    said = capsys.readouterr().err
    assert "rollouts.workflow is 'nowhere:Flow', but there is no module 'nowhere'" in said
