"""A task is refused in boxes that have its package, or a copy of what it deleted."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from real_boxes import why_no_boxes
from small_packages import FILES

from composer_mesh.configs.load import load_config
from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.mesh.task_resources import attach_sandbox
from composer_mesh.plugins.code_tasks.judge.copies import copies_in_boxes
from composer_mesh.plugins.code_tasks.making.functions import Function, functions_in
from composer_mesh.plugins.code_tasks.making.make import made_of
from composer_mesh.plugins.code_tasks.making.package import MakingLimits, package_of
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task import TaskSettings

LIBRARY = (
    f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}/collections/__init__.py"
)
BODY = """    if not words:
        return ""
    found = []
    for word in words:
        found.append(word[:1].upper() + word[1:])
    return " ".join(found)
"""
HEAD = 'def titled(words):\n    """Write words with capitals."""\n'
WHOLE = HEAD + BODY
TEST = 'from wordy import titled\n\n\ndef test_one():\n    assert titled(["a"]) == "A"\n'
FIRST = WHOLE.split("\n").index(BODY.split("\n")[0]) + 1
TREE = {"tree": "wordy-1", "files": {"wordy.py": WHOLE, "test_wordy.py": TEST}}
TASK = {
    "name": "wordy",
    "prompt": "Write titled again.",
    "tree": "wordy-1",
    "deletions": [
        {
            "path": "wordy.py",
            "first": FIRST,
            "last": WHOLE.count("\n"),
            "text": "    raise NotImplementedError\n",
        }
    ],
    "sources": ["wordy.py"],
    "targets": ["wordy:titled"],
    "fail_to_pass": ["test_wordy.py::test_one"],
}
PLAIN = {
    **{name: value for name, value in TASK.items() if name not in {"tree", "deletions"}},
    "files": {"wordy.py": f"{HEAD}    raise NotImplementedError\n", "test_wordy.py": TEST},
    "solution": {"wordy.py": WHOLE},
}


@pytest.fixture
def task(tmp_path: Path) -> CodeTask:
    return CodeTask.create(TaskSettings(path=rows(tmp_path / "tasks.jsonl")))


def rows(file: Path, plain: bool = False) -> Path:
    """Write the task for training and held out; return the file."""
    one = PLAIN if plain else TASK
    every = [*([] if plain else [TREE]), {**one, "split": "train"}]
    every.append({**one, "name": "again", "prompt": "Again.", "split": "heldout"})
    file.write_text("".join(json.dumps(row) + "\n" for row in every))
    return file


async def refused(task: CodeTask, folder: Path) -> str:
    """Return why a task is refused in boxes with a folder of packages; empty if it is not."""
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    boxes = Boxes(boxes=1, folders=[folder])
    try:
        await task.check_sandbox(boxes)
    except UnusableTask as error:
        return str(error)
    finally:
        await boxes.close()
    return ""


def zipped(text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("wordy/__init__.py", text)
    return file.getvalue()


def tarred(text: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        about = tarfile.TarInfo("wordy.py")
        about.size = len(text)
        archive.addfile(about, io.BytesIO(text.encode()))
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "written", "told"),
    [
        ("wordy.py", lambda text: b"", "boxes import wordy from /packages/wordy.py"),
        ("pip/_vendor/wordy.py", str.encode, "boxes have in /packages/pip/_vendor/wordy.py"),
        ("bundled/wordy.zip", zipped, r"in /packages/bundled/wordy.zip!wordy/__init__.py what"),
        ("data/wordy-1.tar.gz", tarred, r"in /packages/data/wordy-1.tar.gz!wordy.py what coding"),
        ("notes.txt", lambda text: text.replace("    ", "\t").encode(), "in /packages/notes.txt"),
    ],
)
async def test_a_task_is_refused_where_boxes_have_what_it_deleted(
    path: str, written: Callable[[str], bytes], told: str, task: CodeTask, tmp_path: Path
) -> None:
    (tmp_path / "deps" / path).parent.mkdir(parents=True)
    (tmp_path / "deps" / path).write_bytes(written(WHOLE))
    said = await refused(task, tmp_path / "deps")
    assert told in said
    assert "take that package out of environment.sandbox.options" in said


async def test_a_task_with_files_of_its_own_is_refused_too(tmp_path: Path) -> None:
    plain = CodeTask.create(TaskSettings(path=rows(tmp_path / "tasks.jsonl", plain=True)))
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps/copied.py").write_text(WHOLE)
    assert "boxes have in /packages/copied.py what coding" in await refused(
        plain, tmp_path / "deps"
    )


async def test_a_task_is_accepted_where_boxes_have_the_stub_alone(
    task: CodeTask, tmp_path: Path
) -> None:
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps/others.py").write_text(f"{HEAD}    raise NotImplementedError\n")
    (tmp_path / "deps/broken.zip").write_bytes(b"PK\3\4 no archive")
    assert await refused(task, tmp_path / "deps") == ""


def test_a_run_is_refused_whose_boxes_have_the_package_of_its_tasks(
    tmp_path: Path,
) -> None:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps/wordy.py").write_text(WHOLE)
    changes = [
        'data.task="code"',
        f'data.path="{rows(tmp_path / "tasks.jsonl")}"',
        f'environment.sandbox.options={{folders=["{tmp_path / "deps"}"], boxes=1}}',
    ]
    config = load_config(Path("configs/one-liners.toml"), changes)
    task = make_task(config)
    with pytest.raises(UnusableTask, match=r"boxes import wordy from /packages/wordy\.py"):
        attach_sandbox(config, task)
    assert task.sandbox is None


async def test_a_copy_in_pythons_own_library_is_told_and_no_reason_to_refuse(
    tmp_path: Path,
) -> None:
    body = namedtuple_body().body.rstrip("\n")
    head = "def named(typename, field_names, *, rename=False, defaults=None, module=None):\n"
    files = {"wordy.py": f"{head}    raise NotImplementedError\n", "test_wordy.py": TEST}
    row = {**PLAIN, "files": files, "solution": {"wordy.py": f"{head}{body}\n"}}
    file = tmp_path / "tasks.jsonl"
    again = {**row, "name": "again", "prompt": "Again.", "split": "heldout"}
    file.write_text("".join(json.dumps(one) + "\n" for one in ({**row, "split": "train"}, again)))
    task = CodeTask.create(TaskSettings(path=file))
    assert not any("library" in line for line in task.remarks())
    (tmp_path / "deps").mkdir()
    assert await refused(task, tmp_path / "deps") == ""
    (told,) = [line for line in task.remarks() if "library" in line]
    assert told.startswith(
        "2 of them can be copied from Python's own library, such as 'wordy' from /"
    )


async def test_no_task_is_made_of_a_function_that_boxes_have(tmp_path: Path) -> None:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    (tmp_path / "other.py").write_bytes(FILES["small/sums.py"].split(b"def upwards")[0])
    boxes = Boxes(boxes=2, folders=[tmp_path], bytecode=True)
    try:
        made = await made_of(boxes, package_of("small", "1.2", "", FILES), MakingLimits(60))
        everywhere = await copies_in_boxes(boxes, (), [namedtuple_body().body])
        installed = await copies_in_boxes(boxes, ["json", "pluggy", "wordy"], [])
    finally:
        await boxes.close()
    names = {row["name"].partition("/")[2] for row in made.tasks}
    assert "small.sums:upwards" in names
    assert not any("total" in name for name in names)
    assert list(everywhere.library.values()) == [LIBRARY]
    assert set(installed.modules) == {"json", "pluggy"}


def namedtuple_body() -> Function:
    """Return a function of the standard library."""
    import collections

    file = Path(str(collections.__file__))
    found = functions_in(file.name, "collections", file.read_bytes()).functions
    return next(one for one in found if one.qualname == "namedtuple")
