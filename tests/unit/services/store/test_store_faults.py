"""Disks that are full, forbidden or wrong: a clear error or quarantine, never damage that is used.

Each fault is a real one: a limit on the size of files, a user who may not write, bytes that change.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from stored_runs import group_of, short_run

from composer_mesh.actors.sqlite_file import StoreError, checksum_of
from composer_mesh.configs.schema import Config
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, GroupState
from composer_mesh.services.store.schema import COLUMNS
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore

NOBODY = 65534


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config()


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    """A run at rest: steps 0 and 1 are trained, group 2 waits, group 3 is under way."""
    asyncio.run(short_run(tmp_path / "run", config))
    return tmp_path / "run"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def reading_only(root: Path) -> Iterator[None]:
    """Nothing may be written below a folder, not even by an administrator."""
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


async def test_a_full_disk_ends_the_call_and_leaves_neither_file_nor_row(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config) as store:
        await store.add_group(0, group_of(0))
        with full_disk(1000), pytest.raises(StoreError, match=r"File too large.*free the disk"):
            await store.add_group(1, group_of(1))
        assert [row.group_id for row in store.reading.groups()] == [0]
        assert [path.name for path in path_of(tmp_path, 1).parent.iterdir()] == [
            "000000.safetensors"
        ]
        await store.add_group(1, group_of(1))
    assert verify_run(tmp_path) == []


async def test_a_full_disk_under_the_database_takes_back_the_whole_step(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config) as store:
        await store.add_group(0, group_of(0))
        limit = (tmp_path / "run.sqlite-wal").stat().st_size
        with (
            full_disk(limit),
            pytest.raises(StoreError, match=r"run\.sqlite cannot keep the state"),
        ):
            await store.plan_step(0, [0], b"recipe" * 100_000)
        assert list(store.reading.steps()) == []
        await store.plan_step(0, [0], b"recipe")
    assert verify_run(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_refused_and_can_be_read(config: Config) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        asyncio.run(short_run(root, config))
        with reading_only(Path(folder)):
            with pytest.raises((StoreError, PermissionError), match=r"readonly|Permission denied"):
                RunStore(root, config)
            with RunReader(root) as reader:
                assert reader.traces(0) == group_of(0)
            assert verify_run(root) == []


def test_a_flipped_byte_in_a_group_that_waits_quarantines_it(run: Path, config: Config) -> None:
    flip(path_of(run, 2), 300)
    (found,) = verify_run(run)
    assert (found.kind, found.where) == ("damaged", "traces/000/000002.safetensors")
    with RunStore(run, config) as store:
        assert store.reading.groups(GroupState.FINISHED) == []
        assert store.reading.traces(2) == []
    (event,) = events(run, "quarantined")
    assert event["fields"]["group"] == 2
    assert "kept as quarantine/000002.safetensors" in event["detail"]
    assert verify_run(run) == []


def test_a_flipped_byte_in_a_group_that_was_trained_is_told_and_never_returned(
    run: Path, config: Config
) -> None:
    flip(path_of(run, 1), 300)
    with RunStore(run, config) as store, pytest.raises(DamagedRecord, match="its CRC-32 is"):
        store.reading.traces(1)
    (found,) = verify_run(run)
    assert found.where == "traces/000/000001.safetensors"


def test_what_a_stop_between_file_and_row_leaves_is_put_in_order(run: Path, config: Config) -> None:
    shutil.copy(path_of(run, 0), path_of(run, 3))
    (path_of(run, 3).parent / ".000004.safetensors.77").write_bytes(b"half")
    assert sorted(found.kind for found in verify_run(run)) == ["orphaned", "orphaned"]
    assert verify_run(run, live=True) == []
    with RunStore(run, config):
        pass
    assert (run / "quarantine" / "000003.safetensors").exists()
    assert verify_run(run) == []


def test_a_torn_page_of_the_database_is_refused_with_the_repair(run: Path, config: Config) -> None:
    with closing(sqlite3.connect(run / "run.sqlite")) as rows:
        (page,) = rows.execute("SELECT rootpage FROM sqlite_master WHERE name = 'steps'").fetchone()
    with (run / "run.sqlite").open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(2048))
    with pytest.raises(StoreError, match=r"it is damaged|malformed|disk image"):
        RunStore(run, config)
    (found,) = verify_run(run)
    assert (found.kind, found.where) == ("damaged", "run.sqlite")
    assert "copy of the run" in found.repair


@contextmanager
def database(run: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(run / "run.sqlite", isolation_level=None)) as rows:
        rows.create_function("seal_of", -1, checksum_of)
        yield rows


def without_seal(rows: sqlite3.Connection, table: str, change: str) -> None:
    """A change to a row that leaves its seal as it was."""
    trigger = f"{table}_changed"
    (made,) = rows.execute("SELECT sql FROM sqlite_master WHERE name = ?", (trigger,)).fetchone()
    rows.execute(f"DROP TRIGGER {trigger}")
    rows.execute(change)
    rows.execute(made)


def contents(run: Path) -> list[Any]:
    """All that the tables say."""
    with closing(sqlite3.connect(run / "run.sqlite")) as rows:
        rows.text_factory = bytes
        return [rows.execute(f"SELECT {COLUMNS[t]} FROM {t}").fetchall() for t in COLUMNS]


def test_a_flipped_bit_in_the_database_is_found_or_says_the_same(run: Path) -> None:
    rng, found, path = random.Random(5), 0, run / "run.sqlite"
    before, content = contents(run), path.read_bytes()
    used = [place for place, byte in enumerate(content) if byte]
    for place in rng.sample(used, 150):
        flip(path, place, rng.randrange(8))
        findings = verify_run(run)
        found += bool(findings)
        if not findings:
            assert contents(run) == before
        path.write_bytes(content)
    assert found > 75


@pytest.mark.parametrize("table", [name for name in COLUMNS if name not in ("steps", "rewards")])
def test_a_row_that_says_something_else_is_moved_and_the_run_goes_on(
    run: Path, config: Config, table: str
) -> None:
    changed = {"groups": "entered = 9", "traces": "reward = 9", "poisoned": "body = 'x'"}
    with database(run) as rows:
        if table == "poisoned":
            rows.execute("INSERT INTO poisoned (body) VALUES (x'7b7d')")
        if table == "divergences":
            rows.execute(
                "INSERT INTO divergences (step, trace_id, turn, body) VALUES (0, 'a', 0, x'')"
            )
        change = changed.get(table, "body = CAST('{}x' AS BLOB)")
        last = f"(SELECT MAX(rowid) FROM {table})"
        without_seal(rows, table, f"UPDATE {table} SET {change} WHERE rowid = {last}")
    assert [found.kind for found in verify_run(run)] == ["damaged"]
    with RunStore(run, config):
        told = events(run, "quarantined")[0]["fields"]["where"]
        assert told.startswith(f"run.sqlite, table {table}, row")
    lines = (run / "quarantine" / "rows.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert f"table {table}" in kept[0][0]
    assert verify_run(run) == []


def test_tables_that_are_not_those_that_were_made_are_refused(run: Path, config: Config) -> None:
    with database(run) as rows:
        rows.execute("DROP TRIGGER groups_changed")
    (found,) = verify_run(run)
    assert (found.where, found.why) == ("run.sqlite", "its tables are not those that were made")
    with pytest.raises(StoreError, match="its tables are not those that were made"):
        RunStore(run, config)


def test_a_reader_never_returns_a_row_that_says_something_else(run: Path) -> None:
    with database(run) as rows:
        without_seal(rows, "groups", "UPDATE groups SET state = 'finished' WHERE group_id = 0")
    with RunReader(run) as reader:
        with pytest.raises(DamagedRecord, match=r"run\.sqlite, table groups, row 0 is damaged"):
            reader.groups()
        assert [row.metrics["step"] for row in reader.steps() if row.metrics] == [1, 2]


def test_a_step_that_says_something_else_is_never_trained_again(run: Path, config: Config) -> None:
    with database(run) as rows:
        without_seal(rows, "steps", "UPDATE steps SET recipe = x'00' WHERE step = 1")
    with pytest.raises(
        DamagedRecord, match=r"table steps, row 2 is damaged.*from a copy of the run"
    ):
        RunStore(run, config)
