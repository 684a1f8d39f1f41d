"""A store that a stranger has made: no size of it is believed, and no SQL of it is run."""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from stored_runs import group_of, short_run

from composer_mesh.actors.sqlite_file import SqliteFile, StoreError, checksum_of, damage_of
from composer_mesh.services.cli import main
from composer_mesh.services.store.group_files import group_bytes, traces_of
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import DamagedRecord
from composer_mesh.services.store.schema import KIND

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
PAGE = 512


@pytest.fixture
async def run(tmp_path: Path, build_config: Any) -> Path:
    await short_run(tmp_path / "run", build_config(late_rewards={"max_age": 1}))
    return tmp_path / "run"


def database(path: Path) -> sqlite3.Connection:
    rows = sqlite3.connect(path, isolation_level=None)
    rows.create_function("seal_of", -1, checksum_of, deterministic=True)
    return rows


def changed(**arrays: Any) -> bytes:
    return bytes(save({**load(group_bytes(group_of(0))), **arrays}))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("runs", np.array([3 * 10**9], np.int64)),
        ("runs", np.array([2**62, 2**62, 2**62], np.int64)),
        ("runs", np.array([-1, 9], np.int64)),
        ("versions", np.zeros(10**6, np.uint16)),
        ("ids", np.zeros((2, 2), np.uint16)),
        ("ids", np.zeros(5, np.float32)),
        ("logprobs", np.zeros(0, np.float32)),
        ("body", np.zeros(5, np.bool_)),
        ("more", np.zeros(1, np.uint8)),
    ],
)
def test_a_group_file_of_kilobytes_asks_for_no_memory(name: str, array: Any) -> None:
    content = changed(**{name: array})
    with pytest.raises(ValueError, match="it is not a group's file"):
        traces_of(content)


def test_a_turn_of_a_stated_length_must_be_there() -> None:
    body = load(group_bytes(group_of(0)))["body"].tobytes()
    for turn in (b"[[4000000000000,4,", b"[[-3,4,"):
        longer = body.replace(b"[[3,4,", turn, 1)
        assert longer != body
        with pytest.raises(ValueError, match="it is not a group's file"):
            traces_of(changed(body=np.frombuffer(longer, np.uint8)))


@pytest.mark.parametrize(
    "statement",
    [
        f"CREATE VIEW endless AS {ENDLESS} i FROM n",
        f"ALTER TABLE traces RENAME TO t; CREATE VIEW traces AS {ENDLESS} i AS trace_id FROM n",
        "ALTER TABLE groups ADD COLUMN big AS (hex(zeroblob(100000000)))",
        "CREATE TRIGGER planted AFTER INSERT ON rewards BEGIN DELETE FROM groups; END",
        "CREATE INDEX slow ON groups (hex(state))",
        "CREATE TABLE more (x)",
        "DROP TABLE poisoned",
    ],
)
def test_a_store_with_another_schema_is_refused_before_a_row_is_read(
    run: Path, statement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(database(run / "run.sqlite")) as rows:
        rows.executescript(statement)
    for read_only in (True, False):
        with pytest.raises(StoreError, match="its tables are not those that were made"):
            SqliteFile(run / "run.sqlite", KIND, read_only)
    for words in (["traces"], ["verify"], ["replay", "--dry-run"]):
        assert main([words[0], str(run), *words[1:]]) != 0
    assert main(["reward", str(run), "train-000000-000", "1"]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_pages_that_refer_to_each_other_do_not_hang_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "run" / "run.sqlite"
    path.parent.mkdir()
    with closing(database(path)) as rows:
        rows.execute(f"PRAGMA page_size = {PAGE}")
        rows.execute(f"PRAGMA application_id = {KIND.application_id}")
        rows.execute(f"PRAGMA user_version = {KIND.version}")
        for table in KIND.tables:
            rows.execute(table)
        many = [(number,) for number in range(500)]
        rows.executemany(
            "INSERT INTO groups (group_id, state, entered) VALUES (?, 'finished', 0)", many
        )
        select = "SELECT rootpage FROM sqlite_master WHERE name = 'groups'"
        (root,) = rows.execute(select).fetchone()
    multiply(path, root, levels=12)
    with RunReader(path.parent) as reader, pytest.raises(StoreError, match="more steps than"):
        reader.groups()
    assert damage_of(path) != ""


def multiply(path: Path, root: int, levels: int) -> None:
    """Put levels of pages between a table's root and its leaves, each of which has all the next."""
    pages = bytearray(path.read_bytes())
    page = bytes(pages[(root - 1) * PAGE : root * PAGE])
    assert page[0] == 5  # an interior page of a table
    (leaf,) = struct.unpack(">I", page[8:12])
    count, last = struct.unpack(">H", page[3:5])[0], len(pages) // PAGE
    for level in range(levels):
        below = leaf if level == levels - 1 else last + level + 2
        pages += pointing(page, count, below)
    pages[(root - 1) * PAGE : root * PAGE] = pointing(page, count, last + 1)
    pages[28:32] = struct.pack(">I", last + levels)
    path.write_bytes(pages)


def pointing(page: bytes, count: int, below: int) -> bytes:
    """Return an interior page whose cells all refer to one page."""
    result = bytearray(page)
    result[8:12] = struct.pack(">I", below)
    for cell in range(count):
        (place,) = struct.unpack(">H", page[12 + 2 * cell : 14 + 2 * cell])
        result[place : place + 4] = struct.pack(">I", below)
    return bytes(result)


def read_all(reader: RunReader) -> None:
    every = [*reader.groups(), *reader.rows(), *reader.steps()]
    assert every + [stored_pair(row) for row in reader.pairs()]


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal", "-shm"])
def test_a_pipe_in_place_of_a_database_is_refused(run: Path, suffix: str) -> None:
    path = run / f"run.sqlite{suffix}"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        SqliteFile(run / "run.sqlite", KIND, read_only=True)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET bytes = 'many'",
        "UPDATE groups SET entered = x'00'",
        "UPDATE traces SET error_kinds = '5'",
        "UPDATE traces SET error_kinds = CAST(x'ff' AS TEXT)",
        "UPDATE traces SET split = 'other'",
        "UPDATE traces SET tokens = 'many'",
        "UPDATE pairs SET body = x'5b5d'",
        "UPDATE steps SET metrics = '[]'",
        f"UPDATE steps SET metrics = '{'[' * 5000}'",
    ],
)
def test_a_row_of_other_types_is_damaged_whatever_its_checksum_says(
    run: Path, statement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(database(run / "run.sqlite")) as rows:
        rows.execute(statement)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    with RunReader(run) as reader, pytest.raises(DamagedRecord):
        read_all(reader)
