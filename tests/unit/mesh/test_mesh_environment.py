"""What is set before Monarch starts, and what stays out of the terminal.

Garbage collections of a process with a mesh are short, and rare.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from composer_mesh.mesh.actor import RARELY, leave_out_loaded
from composer_mesh.mesh.environment import (
    GROUP_UMASK,
    IMPORT_PATHS,
    NOISE,
    UMASK,
    add_import_paths,
    class_environment,
    prepare_environment,
    set_umask,
    without_noise,
)
from composer_mesh.mesh.spawn import MeshHost


def test_a_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_MAX_CHUNK_SIZE_MB", "16")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    prepare_environment()
    assert os.environ["MONARCH_RDMA_MAX_CHUNK_SIZE_MB"] == "16"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_only_noise_is_kept_from_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise():
        for line in NOISE:
            os.write(2, line + b" ...\n")
        os.write(2, b"a real error\n")
        print("a result")
    assert capfd.readouterr() == ("a result\n", "a real error\n")


def test_what_was_written_before_a_failure_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), without_noise():  # noqa: PT012
        sys.stderr.write("the last words\n")
        raise KeyError
    assert capfd.readouterr().err == "the last words\n"


WRITES = """
import os, pathlib, sys
from composer_mesh.mesh.environment import set_umask
set_umask()
pathlib.Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize(("chosen", "mode"), [(None, 0o600), (GROUP_UMASK, 0o640)])
def test_what_a_run_writes_is_its_users_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, mode: int
) -> None:
    os.umask(0)  # as a shell that lets everybody read has it
    monkeypatch.delenv(UMASK, raising=False)
    set_umask(chosen)
    (tmp_path / "own").touch()
    os.umask(0)  # as the shell of another host may have it
    command = [sys.executable, "-c", WRITES, str(tmp_path / "child")]
    subprocess.run(command, check=True)
    for name in ("own", "child"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_users_folders_are_searched_last_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    environ: dict[str, str] = {}
    for _ in range(2):
        add_import_paths([tmp_path / "b", tmp_path / "a"], environ)
    assert sys.path[-2:] == [str(tmp_path / "b"), str(tmp_path / "a")]
    assert environ[IMPORT_PATHS] == f"{tmp_path / 'b'}{os.pathsep}{tmp_path / 'a'}"


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_process_with_a_mesh_leaves_out_what_it_had_loaded_and_nothing_later() -> None:
    MeshHost()
    assert gc.get_freeze_count() > 10_000
    later = [object() for _ in range(10)]
    leave_out_loaded()
    MeshHost()
    assert any(one is later for one in gc.get_objects())  # which has none that is left out


def test_the_owner_of_a_mesh_seldom_collects_all_of_its_objects() -> None:
    MeshHost()
    assert gc.get_threshold() == RARELY


@pytest.mark.parametrize(
    ("name", "file", "folder"),
    [
        ("mine", "mine.py", "."),
        ("pack.mine", "pack/mine.py", "."),
        ("pack.inner", "pack/inner/__init__.py", "."),
        ("__main__", "scripts/run.py", "scripts"),
        ("__main__", None, "here"),
    ],
)
def test_a_class_is_imported_from_where_this_process_has_it(
    name: str, file: str | None, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    module = ModuleType(name)
    if file is not None:
        module.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(IMPORT_PATHS, "/given")
    kind = type("Mine", (), {"__module__": name})
    assert class_environment(kind) == {}  # its folder is not searched here either
    monkeypatch.syspath_prepend(tmp_path / folder)
    folders = os.pathsep.join(["/given", str((tmp_path / folder).absolute())])
    assert class_environment(kind) == {IMPORT_PATHS: folders}


def test_our_classes_need_no_variable_and_one_without_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert class_environment(MeshHost) == {}
    monkeypatch.setitem(sys.modules, "cell", ModuleType("cell"))
    with pytest.raises(TypeError, match=r"Mine is a class of the module 'cell', which has no file"):
        class_environment(type("Mine", (), {"__module__": "cell"}))
