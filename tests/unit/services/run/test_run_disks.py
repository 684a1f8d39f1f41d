"""A run whose disk is lost, full or forbidden ends with one line that says so, which nothing hides.

The command is the real one, with its store and its reports; only the mesh is a fake.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from stored_runs import group_of

from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.services.directory.claim import RunDirectoryError, claimed
from composer_mesh.services.run.assembly import TrainingRun, train_command
from composer_mesh.services.run.failure_report import report_failure
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.store.schema import KIND
from composer_mesh.services.store.writing import RunStore

Fault = Callable[[Path], None]
REPAIR = "free the disk or correct its permissions, then continue with train --resume"


class NoWatch:
    """Shows nothing."""

    async def open(self, *_: object) -> None:
        await asyncio.sleep(0)

    def over(self, _mesh: object) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def ended(self, _state: str) -> None:
        await asyncio.sleep(0)


class NoMesh:
    """Actors that are only closed."""

    restarts = 0

    async def close(self) -> None:
        await asyncio.sleep(0)


class FaultyRun(TrainingRun):
    """A run that stores a group, has a fault of its disk, and stores another or waits for ever."""

    fault: Fault
    waits = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._watch = cast(Any, NoWatch())

    async def _start_mesh(self, _config: Config, _host: MeshHost) -> Any:
        return NoMesh()

    async def _train_on(self, _mesh: RunMesh) -> None:
        await self.store.add_group(0, group_of(0))
        self.fault(self.store.root)
        if self.waits:
            await asyncio.Event().wait()
        self.event("still_here", "", "x" * 5000)
        await self.store.add_group(1, group_of(1))


@pytest.fixture
def play(tmp_path: Path, build_config: Any) -> Callable[..., int]:
    config = build_config(run={"name": "unit", "seed": 3, "steps": 2})

    def played(fault: Fault, waits: bool = False) -> int:
        def make_run(*arguments: Any) -> TrainingRun:
            run = FaultyRun(*arguments)
            run.fault, run.waits = fault, waits
            return run

        return train_command(config, tmp_path / "run", CommandSignals(), make_run=make_run)

    return played


def remove(root: Path) -> None:
    while root.exists():  # a thread of the run may write a file between the listing and the rmdir
        shutil.rmtree(root, ignore_errors=True)


def replace(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    shutil.copytree(root.with_name("elsewhere"), root)


def refuse_all(root: Path) -> None:
    """From now on the disk takes no group, no event and no summary."""
    for name in ("traces/000/000001.safetensors", "summary.json"):
        (root / name).mkdir()


@pytest.mark.parametrize("waits", [False, True], ids=["that writes", "that waits"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [(remove, "it was removed while in use"), (replace, "it was replaced while in use")],
    ids=["removed", "replaced"],
)
def test_a_run_whose_directory_is_lost_ends_at_once_and_says_so(
    fault: Fault, said: str, waits: bool, play: Any, tmp_path: Path, capfd: Any
) -> None:
    assert play(fault, waits) == 1
    err = capfd.readouterr().err
    # a directory that is replaced is missing for a moment
    assert err in {
        f"composer-mesh: {tmp_path}/run/run.sqlite cannot keep the state of the run ({why}): "
        f"{REPAIR}\n"
        for why in (said, "it was removed while in use")
    }


def test_a_disk_that_takes_nothing_more_is_one_line_that_no_second_failure_hides(
    play: Any, tmp_path: Path, capfd: Any
) -> None:
    assert play(refuse_all) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"composer-mesh: {tmp_path}/run cannot keep the state of the run (")
    assert err.endswith(f"000001.safetensors'): {REPAIR}\n")
    assert err.count("\n") == 1


def test_a_disk_that_takes_no_summary_fails_a_run_that_has_done_all(
    tmp_path: Path, build_config: Any, capfd: Any
) -> None:
    class Done(FaultyRun):
        async def _train_on(self, _mesh: RunMesh) -> None:
            refuse_all(self.store.root)

    (tmp_path / "run" / "traces" / "000").mkdir(parents=True)
    config = build_config(run={"name": "unit", "seed": 3, "steps": 2})
    assert train_command(config, tmp_path / "run", CommandSignals(), make_run=Done) == 1
    err = capfd.readouterr().err
    assert err.startswith("composer-mesh: ")
    assert err.endswith(f"cannot keep the state of the run (Is a directory): {REPAIR}\n")
    assert err.count("\n") == 1


def test_an_event_that_nobody_waits_for_and_the_disk_does_not_take_fails_the_run(
    tmp_path: Path, build_config: Any
) -> None:
    with RunStore(tmp_path, build_config()) as store:
        (tmp_path / "events.jsonl").mkdir()
        store.add_event("run_started")
        with pytest.raises(StoreError, match=r"events\.jsonl cannot keep .*Is a directory.*free"):
            store.finish()


def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(tmp_path: Path) -> None:
    file = SqliteFile(tmp_path / "run.sqlite", KIND)
    (tmp_path / "run.sqlite").rename(tmp_path / "other")
    with pytest.raises(StoreError, match="removed while in use"), file.transaction():
        raise AssertionError("the transaction was entered")
    (tmp_path / "run.sqlite").write_bytes(b"")
    with pytest.raises(StoreError, match="replaced while in use"), file.transaction():
        raise AssertionError("the transaction was entered")
    file.close()


def test_a_store_is_never_mapped_into_memory_where_a_shrinking_file_kills_its_reader(
    tmp_path: Path,
) -> None:
    for read_only in (False, True):
        file = SqliteFile(tmp_path / "run.sqlite", KIND, read_only=read_only)
        with file.reading() as rows:
            assert rows.execute("PRAGMA mmap_size").fetchone() == (0,)
        file.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write")
def test_a_directory_that_may_not_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        with (
            pytest.raises(RunDirectoryError, match=r"Permission denied.*--output"),
            claimed(place / "run"),
        ):
            pass
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM])
def test_an_error_of_a_disk_is_one_line_wherever_it_comes_from(number: int, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number), "/far/file")
    text = report_failure(error, tmp_path).text
    assert text == (f"/far/file cannot keep the state of the run ({os.strerror(number)}): {REPAIR}")
    reset = report_failure(OSError(errno.ECONNRESET, "reset"), tmp_path)
    assert "ConnectionReset" in reset.line
    assert (tmp_path / "logs" / "errors.log").stat().st_mode & 0o77 == 0
