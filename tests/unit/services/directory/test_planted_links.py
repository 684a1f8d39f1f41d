"""Links that a stranger's run folder has where a run writes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from stored_runs import short_run

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.actors.panel.configured import ledger_name
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.hosts.roster import Record, announce
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.services.directory.claim import RunDirectoryError, claimed
from composer_mesh.services.directory.curve import draw_reward_curve
from composer_mesh.services.directory.report import METRICS_FILE, read_metrics, write_summary
from composer_mesh.services.directory.status import RunStatus, write_status
from composer_mesh.services.store.writing import RunStore

OWN = "a file of the user's own"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "private"
    path.parent.mkdir()
    path.write_text(OWN)
    return path


@pytest.fixture
def run(tmp_path: Path, build_config: Callable[..., Config]) -> Path:
    root = tmp_path / "run"
    with claimed(root):
        written(root, build_config())
    return root


def written(root: Path, config: Config) -> None:
    """Write what the controller of a run and its actors write there."""
    asyncio.run(_stored(root, config))
    write_status(root, RunStatus(1, "http://127.0.0.1:4711", "train", 1, 2, 1, "shm"))
    write_summary(root, wall_s=1.0, configured=["policy"])
    draw_reward_curve(
        read_metrics(root / METRICS_FILE), root / "reward.png", title="", evaluations=()
    )
    ledger_name("unit", root)
    announce(root / "hosts", Record("gpu-0", "tcp:127.0.0.1:1", "python", 1, "boot"))
    draft = CheckpointDraft(root, 1)
    (draft.folder / "model").write_text("")
    draft.commit([])


async def _stored(root: Path, config: Config) -> None:
    if not (root / "run.sqlite").exists():
        await short_run(root, config)
    with RunStore(root, config) as store:
        store.add_event("run_started")
        store.add_timeline({"step": 1})
        store.finish()


def places(run: Path) -> Iterator[Path]:
    """Yield each file and folder below a finished run, deepest first."""
    for path in sorted(run.rglob("*"), reverse=True):
        yield path.relative_to(run)


def planted(run: Path, copy: Path, place: Path, target: Path) -> None:
    """Copy the run with a link in place of one file, or of one folder."""
    shutil.copytree(run, copy)
    leads_to = target
    if (copy / place).is_dir():
        shutil.rmtree(copy / place)
        leads_to = target.parent
    else:
        (copy / place).unlink()
    (copy / place).symlink_to(leads_to)


def test_a_run_is_not_started_where_any_of_its_files_is_a_link(
    run: Path, target: Path, tmp_path: Path
) -> None:
    for number, place in enumerate(places(run)):
        copy = tmp_path / f"copy-{number}"
        planted(run, copy, place, target)
        with pytest.raises(RunDirectoryError, match="is a link to") as raised, claimed(copy):
            pass
        assert str(copy / place) in str(raised.value)
    assert target.read_text() == OWN
    assert list(target.parent.iterdir()) == [target]


def test_no_writer_of_a_run_follows_a_link_that_comes_later(
    run: Path, target: Path, tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    """As above without the look at the folder before: a writer replaces the link, or refuses."""
    for number, place in enumerate(places(run)):
        copy = tmp_path / f"copy-{number}"
        planted(run, copy, place, target)
        with suppress(OSError, StoreError, RunDirectoryError):
            written(copy, build_config())
        assert target.read_text() == OWN, place
        assert list(target.parent.iterdir()) == [target], place


def test_a_link_to_a_folder_that_does_not_exist_is_refused_too(run: Path, tmp_path: Path) -> None:
    (run / "late").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match="is a link to"), claimed(run):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_run_may_be_reached_through_a_link_and_have_links_of_its_own(
    run: Path, tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    (tmp_path / "runs").symlink_to(tmp_path)
    (tmp_path / "mine").symlink_to(run)
    (run / "latest").symlink_to("checkpoints")
    for name in ("runs/run", "mine"):
        with claimed(tmp_path / name):
            written(tmp_path / name, build_config())


def test_a_pipe_where_a_file_is_written_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with OpenFolder(tmp_path) as folder, pytest.raises(OSError, match=r"events\.jsonl"):
        folder.append("events.jsonl")
