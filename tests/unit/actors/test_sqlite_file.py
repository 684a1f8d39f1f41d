"""A SQLite file of ours: recognised, and read without a change."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from composer_mesh.actors.sqlite_file import (
    FileKind,
    SqliteFile,
    StoreError,
    checksum_of,
    damage_of,
)

FIRST = FileKind("be a test", "mend it", 77, 1, ("CREATE TABLE things (name TEXT)",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the first version with one row."""
    with closing(SqliteFile(tmp_path / "file.sqlite", FIRST)) as file, file.transaction() as rows:
        rows.execute("INSERT INTO things VALUES ('a')")
    return tmp_path / "file.sqlite"


def things(path: Path, kind: FileKind, read_only: bool = False) -> list[tuple[object, ...]]:
    with closing(SqliteFile(path, kind, read_only)) as file, file.reading() as rows:
        return list(rows.execute("SELECT * FROM things").fetchall())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (replace(FIRST, version=3), "its version is 1, not 3"),
        (replace(FIRST, version=0), "its version is 1, not 0"),
        (replace(FIRST, application_id=5), "a database of another kind"),
    ],
)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_of_another_version_or_kind_is_left_as_it_is(
    path: Path, kind: FileKind, why: str, read_only: bool
) -> None:
    before = path.read_bytes()
    with pytest.raises(StoreError, match=why):
        SqliteFile(path, kind, read_only)
    assert path.read_bytes() == before


def test_a_reader_sees_what_a_writer_adds_and_changes_nothing(path: Path) -> None:
    files = (SqliteFile(path, FIRST), SqliteFile(path, FIRST, read_only=True))
    with closing(files[0]) as writer, closing(files[1]) as reader:
        with writer.transaction() as rows:
            rows.execute("INSERT INTO things VALUES ('b')")
        with reader.reading() as rows:
            assert rows.execute("SELECT COUNT(*) FROM things").fetchone() == (2,)
        with pytest.raises(StoreError, match="readonly"), reader.transaction() as rows:
            rows.execute("DELETE FROM things")


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        SqliteFile(tmp_path / "none.sqlite", FIRST, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_be_read_where_no_log_can_be_made(path: Path) -> None:
    path.with_name("file.sqlite-shm").mkdir()
    assert things(path, FIRST, read_only=True) == [("a",)]


def test_a_seal_tells_values_types_and_borders_apart() -> None:
    rows = [("ab", "c"), ("a", "bc"), ("abc",), (1, 2), ("1", 2), (1.0, 2), (12,), (None,), ("",)]
    assert len({checksum_of(*row) for row in rows}) == len(rows)
    assert checksum_of(b"x", 0.1) == checksum_of(b"x", 0.1)


def test_damage_is_told_and_a_whole_file_has_none(path: Path) -> None:
    assert damage_of(path) == ""
    with closing(sqlite3.connect(path)) as rows:
        pages = rows.execute("PRAGMA page_count").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((pages - 1) * 4096)
        file.write(b"\xff" * 64)
    assert damage_of(path) != ""
