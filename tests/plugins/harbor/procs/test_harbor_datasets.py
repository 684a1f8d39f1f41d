"""Harbor tasks of a dataset, downloaded by huggingface_hub's own client from a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import PATIENT, TOKEN, Hub, served

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"
TASKS = ("copy-file", "write-hello")
READ = """
import json, sys
from pathlib import Path
from composer_mesh.configs.load import load_config
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.services.checks.hub import hub_remarks, with_models
from composer_mesh.tasks.task import TaskSettings

sets = ["data.task=harbor", f"data.path={sys.argv[1]}"]
config = with_models(load_config(Path("quickstart"), sets))
task = HarborTask.create(TaskSettings(path=config.data.path, heldout_every=2))
rows = {row["name"]: row for split in ("train", "heldout") for row in task.rows(split)}
steps = [task.folder_of(row).steps[0] for row in rows.values()]
tests = [name for step in steps for name in step.tests().contents]
found = {"names": sorted(rows), "tests": tests, "path": str(config.data.path)}
print(json.dumps({**found, "remarks": list(hub_remarks(config))}))
"""
Reader = Callable[..., Any]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with a dataset of two tasks, and one of them in another folder."""
    with served() as hub:
        files = {
            f"tasks/{file.relative_to(EXAMPLES)}": file.read_bytes()
            for name in TASKS
            for file in (EXAMPLES / name).rglob("*")
            if file.is_file()
        }
        moved = {
            name.replace("tasks/copy-file", "more/copied"): content
            for name, content in files.items()
            if "copy-file" in name
        }
        hub.repository("acme/terminal", "datasets").commit({**files, **moved, "README.md": b"two"})
        yield hub


@pytest.fixture
def read(hub: Hub, tmp_path: Path) -> Reader:
    """Read a dataset in a process of its own, which has a cache; return what was found there."""

    def found(name: str, status: int = 0, **environment: str) -> Any:
        kept = {one: value for one, value in os.environ.items() if not one.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", READ, name],
            env={
                **kept,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_DISABLE_XET": "1",
                **PATIENT,
                **environment,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert TOKEN not in done.stdout + done.stderr
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout) if status == 0 else done.stderr

    return found


def test_a_dataset_is_pinned_and_downloaded_once_and_has_no_links(
    hub: Hub, read: Reader, tmp_path: Path
) -> None:
    commit = hub.repository("acme/terminal", "datasets").revisions["main"]
    found = read("acme/terminal")
    assert found["path"] == f"acme/terminal@{commit}"
    assert found["names"] == ["more/copied", *(f"tasks/{name}" for name in TASKS)]
    assert found["tests"].count("test.sh") == 3
    assert f"data.path: acme/terminal@{commit}, a folder of files" in found["remarks"]
    folder = tmp_path / "home" / "composer-mesh" / "acme" / "terminal" / commit
    assert folder.is_dir()
    assert not [file for file in folder.rglob("*") if file.is_symlink()]
    hub.repository("acme/terminal", "datasets").commit({"README.md": b"moved"})
    asked = len(hub.requests)
    assert read(found["path"], HF_HUB_OFFLINE="1")["names"] == found["names"]
    assert len(hub.requests) == asked


def test_a_folder_of_a_dataset_is_its_own_set(read: Reader) -> None:
    assert read("acme/terminal:more")["names"] == ["copied"]
    assert "it has no folder 'none': correct what follows the :" in read("acme/terminal:none", 1)


def test_a_private_dataset_needs_the_token_and_an_unknown_one_is_refused(
    hub: Hub, read: Reader
) -> None:
    hub.repository("acme/terminal", "datasets").private = True
    assert "set HF_TOKEN for a private one" in read("acme/terminal", 1)
    assert read("acme/terminal", HF_TOKEN=TOKEN)["names"]
    assert "there is neither such a path in the working directory" in read("acme/none", 1)


def test_a_dataset_that_cannot_be_stored_is_refused_with_the_repair(
    read: Reader, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "composer-mesh").write_text("no folder")
    said = read("acme/terminal", 1)
    assert "it cannot be stored (Not a directory): make room, or set HF_HOME to another" in said
