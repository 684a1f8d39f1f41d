"""What a stranger may have done to a file: bytes, JSON values, arrays, rows, and kinds of files."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import tomllib
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import load, save

from composer_mesh.actors.sqlite_file import checksum_of
from composer_mesh.services.store.schema import COLUMNS

DEEP = 20_000
HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63 - 1, 2**64, 10**400, 1e308, -0.0, float("nan")),
    *(float("inf"), "", "x" * 70_000, "\x1b[31m\x07", "\ud800", "[red]", "../../etc/passwd"),
    *("/dev/zero", [], {}, [[]], {"a": 1}, [None], [{}], {"role": 5}, "1e5", "٣"),
)
"""Values of wrong types and sizes; JSON spells each, some only for lenient readers."""

Mutate = Callable[[random.Random, bytes], bytes]


def bytes_changed(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    data, ways = bytearray(content), rng.randrange(6)
    place = rng.randrange(len(data) + 1)
    if ways == 0:
        return bytes(data[:place])
    if ways == 1:
        return bytes(data[:place] + data[place // 2 :])
    if ways == 2:
        return bytes(data[:place]) + rng.randbytes(rng.randrange(64)) + bytes(data[place:])
    if ways == 3:
        return rng.choice(
            (b"", b"\0" * 4096, b"[" * DEEP, b'{"a":' * DEEP, b"\xff\xfe", b"9" * DEEP)
        )
    for _ in range(rng.choice((1, 1, 4, 64))):
        if data:
            data[rng.randrange(len(data))] = rng.choice((0, 0xFF, 0x80, rng.randrange(256)))
    return bytes(data)


def json_changed(rng: random.Random, content: bytes) -> bytes:
    """Replace, remove or add one value anywhere in a JSON text."""
    if rng.random() < 0.3:
        return bytes_changed(rng, content)
    return json.dumps(value_changed(rng, json.loads(content))).encode()


def lines_changed(rng: random.Random, content: bytes) -> bytes:
    """Change one line of a JSON-lines file."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return b"".join([*lines[:place], json_changed(rng, lines[place]) + b"\n", *lines[place + 1 :]])


def toml_changed(rng: random.Random, content: bytes) -> bytes:
    """Replace one value of a TOML file; what TOML cannot spell becomes changed bytes."""
    try:
        return tomli_w.dumps(value_changed(rng, tomllib.loads(content.decode()))).encode()
    except (AttributeError, TypeError, ValueError, RecursionError):
        return content[: rng.randrange(len(content))] + b"\xff" + rng.randbytes(8)


def value_changed(rng: random.Random, value: Any) -> Any:
    """Return a value with one hostile value in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: value_changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        return [*value[:place], value_changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice(HOSTILE)


def arrays_changed(rng: random.Random, content: bytes) -> bytes:
    """Change an array or the body of a group's file, which stays a file of its format."""
    tensors = dict(load(content))
    name = rng.choice(sorted(tensors))
    if name == "body" and rng.random() < 0.8:
        body = json_changed(rng, tensors[name].tobytes())
        tensors[name] = np.frombuffer(body, np.uint8)
    else:
        tensors[name] = _other_array(rng, tensors[name])
    if rng.random() < 0.1:
        tensors.pop(rng.choice(sorted(tensors)))
    return bytes(save(tensors))


def _other_array(rng: random.Random, array: Any) -> Any:
    kind = rng.choice((np.int64, np.int32, np.uint16, np.float32, np.float64, np.uint8, np.bool_))
    values = array.copy()
    way = rng.randrange(5)
    if way == 0 and values.size:
        top = np.iinfo(values.dtype).max if values.dtype.kind in "iu" else np.inf
        values[rng.randrange(values.size)] = rng.choice((top, 0))
        return values
    if way == 1:
        return values.astype(np.int64) * rng.choice((-1, 10**9, 10**15))
    if way == 2:
        return np.zeros(rng.choice(((), (0,), (1, 1), (5,), (0, 7))), kind)
    return values[: rng.randrange(values.size + 1)].astype(rng.choice((values.dtype, kind)))


def group_replaced(run: Path, path: Path, content: bytes) -> None:
    """Write a group's file, and make the store say that this is what was written."""
    path.write_bytes(content)
    with closing(database(run)) as rows:
        rows.execute(
            "UPDATE groups SET bytes = ?, crc = ? WHERE group_id = ?",
            (len(content), zlib.crc32(content), int(path.stem)),
        )


def database(run: Path) -> sqlite3.Connection:
    """The store as a stranger opens it; its triggers renew the checksums."""
    rows = sqlite3.connect(run / "run.sqlite", isolation_level=None)
    rows.create_function("seal_of", -1, checksum_of, deterministic=True)
    return rows


LOOP = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
SCHEMAS = (
    f"CREATE VIEW endless AS {LOOP} i FROM n",
    f"ALTER TABLE traces RENAME TO t; CREATE VIEW traces AS {LOOP} i AS trace_id FROM n",
    "ALTER TABLE groups ADD COLUMN big AS (hex(zeroblob(100000000)))",
    "CREATE TRIGGER planted AFTER INSERT ON rewards BEGIN DELETE FROM groups; END",
    "DROP TABLE steps",
    "CREATE INDEX slow ON groups (hex(zeroblob(10000000)))",
    "CREATE TABLE more (x)",
    "PRAGMA user_version = 2",
    "PRAGMA application_id = 7",
    "DROP TRIGGER groups_changed",
)


def rows_changed(rng: random.Random, run: Path) -> None:
    """Change a value of any row to one of any type, or the schema."""
    with closing(database(run)) as rows:
        if rng.random() < 0.15:
            rows.executescript(rng.choice(SCHEMAS))
            return
        table = rng.choice(sorted(COLUMNS))
        column = rng.choice(COLUMNS[table].split(", "))
        old = rows.execute(f"SELECT {column} FROM {table}").fetchall()
        value = _sql_value(rng, rng.choice(old)[0] if old else b"{}")
        try:
            rows.execute(
                f"UPDATE {table} SET {column} = ? WHERE rowid IN "
                f"(SELECT rowid FROM {table} ORDER BY random() LIMIT ?)",
                (value, rng.choice((1, 100))),
            )
        except sqlite3.IntegrityError:
            rows.execute(f"DELETE FROM {table} WHERE rowid % 2 = 0")


def _sql_value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, bytes) and old and rng.random() < 0.8:
        return json_changed(rng, old)
    simple = [one for one in HOSTILE if isinstance(one, int | float | None) and _fits(one)]
    return rng.choice([*simple, "", "x" * 9999, "\x1b[31m", b"", b"\xff", b"[" * DEEP, '["a", 5]'])


def _fits(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) < 2**63


def other_kind(rng: random.Random, path: Path) -> None:
    """Replace a file by something that is none, or that is endless."""
    path.unlink(missing_ok=True)
    way = rng.randrange(6)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/full", "/proc/self/mem", path)))
    elif way == 2:
        path.mkdir()
    elif way == 3:
        with path.open("wb") as file:
            file.truncate(2**41)
    elif way == 4:
        path.touch(mode=0o000)
