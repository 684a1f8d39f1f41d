"""The folder of the `disk` transport: a run removes what it made there, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.mesh.weights.transports import FOLDER_PREFIX
from composer_mesh.services.run.weights_folder import NOTES_FILE, RunFolders, settled


class Events:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def __call__(self, kind: str, _actor: str, detail: str, /, **_fields: Any) -> None:
        self.all.append((kind, detail))


@pytest.fixture
def events() -> Events:
    return Events()


def run_directory(tmp_path: Path, name: str = "runs/qwen3-8b") -> Path:
    root = tmp_path / name
    root.mkdir(parents=True)
    return root


def publish(folder: Path) -> Path:
    """What a publisher of weights makes in the folder of its run."""
    file = folder / f"{FOLDER_PREFIX}abc" / "version-1-rank-0.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    return file


@pytest.mark.parametrize("transport", ["shm", "rdma", "disk"])
async def test_a_model_under_the_runs_name_in_the_weights_folder_survives_the_run(
    transport: str, build_config: Any, tmp_path: Path, events: Events
) -> None:
    model = tmp_path / "models" / "qwen3-8b" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"not the run's")
    config = build_config(weights={"transport": transport, "folder": tmp_path / "models"})
    async with settled(config, run_directory(tmp_path), events):
        assert model.exists()
    assert model.read_bytes() == b"not the run's"
    assert list((tmp_path / "models").iterdir()) == [model.parent]
    assert events.all == []


@pytest.mark.parametrize("given", [False, True])
async def test_the_files_of_disk_go_with_the_run(
    given: bool, build_config: Any, tmp_path: Path, events: Events
) -> None:
    root, shared = run_directory(tmp_path), tmp_path / "shared"
    weights = {"transport": "disk", **({"folder": shared} if given else {})}
    async with settled(build_config(weights=weights), root, events) as (config, _):
        folder = config.weights.folder
        assert folder is not None
        assert folder.parent == (shared if given else root)
        publish(folder)
    assert not folder.exists()
    assert not (root / NOTES_FILE).exists()
    assert events.all == []


async def test_two_runs_of_one_name_have_folders_of_their_own(
    build_config: Any, tmp_path: Path, events: Events
) -> None:
    config = build_config(weights={"transport": "disk", "folder": tmp_path / "shared"})
    first, second = run_directory(tmp_path, "a/run"), run_directory(tmp_path, "b/run")
    async with settled(config, first, events) as (one, _):
        assert one.weights.folder is not None
        file = publish(one.weights.folder)
        async with settled(config, second, events) as (other, _):
            assert other.weights.folder != one.weights.folder
            assert file.exists()
        assert file.exists()
    assert list((tmp_path / "shared").iterdir()) == []
    assert events.all == []


async def test_what_a_killed_run_left_is_removed_by_its_own_next_start_only(
    build_config: Any, tmp_path: Path, events: Events
) -> None:
    shared, root = tmp_path / "shared", run_directory(tmp_path, "a/run")
    left = publish(RunFolders(root).make(shared))  # and SIGKILL: nothing of the process goes on
    config = build_config(weights={"transport": "disk", "folder": shared})
    async with settled(config, run_directory(tmp_path, "b/run"), events):
        assert left.exists()
    assert left.exists()
    async with settled(config, root, events):
        assert not left.parent.parent.exists()
    assert list(shared.iterdir()) == []
    assert events.all == []


def test_a_kill_while_the_folder_is_made_or_removed_leaves_nothing_for_ever(tmp_path: Path) -> None:
    root = run_directory(tmp_path)
    for state in ("never made", "not marked", "half marked", "half removed"):
        folder = RunFolders(root).make(None)
        if state != "half removed":
            (folder / "owner.txt").unlink()
        if state == "half marked":
            (folder / ".owner.txt.123").write_text("")
        if state == "never made":
            folder.rmdir()
        assert RunFolders(root).remove() == [], state
        assert list(root.iterdir()) == [], state


async def test_what_nobody_of_the_run_made_stays_and_is_an_event_of_each_start(
    build_config: Any, tmp_path: Path, events: Events
) -> None:
    root, config = run_directory(tmp_path), build_config(weights={"transport": "disk"})
    async with settled(config, root, events) as (found, _):
        folder = found.weights.folder
        assert folder is not None
        published = publish(folder)
        (folder / "notes.md").write_text("a user's")
    assert not published.exists()
    kept = f"{folder} is not removed: the run did not make notes.md: move that away"
    assert events.all == [("weights_kept", kept)]
    async with settled(config, root, events):
        assert (folder / "notes.md").read_text() == "a user's"
    assert events.all == [("weights_kept", kept)] * 3  # before the second start and at its end
    (folder / "notes.md").unlink()
    assert RunFolders(root).remove() == []
    assert not folder.exists()


def test_a_copy_of_a_run_directory_does_not_remove_the_folder_of_the_original(
    tmp_path: Path,
) -> None:
    root, copy = run_directory(tmp_path), run_directory(tmp_path, "runs/copy")
    file = publish(RunFolders(root).make(tmp_path / "shared"))
    (copy / NOTES_FILE).write_bytes((root / NOTES_FILE).read_bytes())
    [(folder, why)] = RunFolders(copy).remove()
    assert (folder, why) == (file.parent.parent, f"it belongs to the run in {root}")
    assert file.exists()


def test_a_removal_that_fails_says_why_and_is_tried_again(tmp_path: Path) -> None:
    root = run_directory(tmp_path)
    folder = RunFolders(root).make(None)
    (folder / f"{FOLDER_PREFIX}link").symlink_to(tmp_path)  # not to be followed
    [(kept, why)] = RunFolders(root).remove()
    assert kept == folder
    assert "symbolic link" in why
    (folder / f"{FOLDER_PREFIX}link").unlink()
    assert RunFolders(root).remove() == []
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_refused_with_the_repair(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportUnavailable, match=r"set weights\.folder to a folder"):
        RunFolders(run_directory(tmp_path)).make(tmp_path / "file")
