"""The log of a training server: operations with their answers, and what they made.

An operation is in the log before its client learns its id, and its answer is in one transaction
with the position of its model. So each is executed once, whenever a process ends.
"""

import hashlib
import json
import math
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from composer_mesh.actors.sqlite_file import FileKind
from composer_mesh.plugins.tinker.models.messages import BatchShape, ModelSpec
from composer_mesh.plugins.tinker.server.records import (
    Accepted,
    ClientSession,
    Model,
    Operation,
    OperationRequest,
    Record,
    SamplerSource,
    Saved,
)
from composer_mesh.plugins.tinker.server.results import MediaType, Result
from composer_mesh.services.web.errors import bad

QUEUED, DONE, FAILED, EXPIRED = 0, 1, 2, 3
PIECE, ROW_BYTES = 4 * 2**20, 1000
"""Bytes that one job frees, and those of a row in addition to its body and its answer.

A megabyte takes some 5 ms, in which the log does nothing else."""
MEDIA: tuple[MediaType, ...] = ("json", "protobuf")
T = TypeVar("T")
_RECORD = "SELECT id, content FROM records WHERE kind = ?"

KIND = FileKind(
    purpose="be the log of a training server",
    repair="serve from another --output, or take the file from a copy",
    application_id=0x434D5356,
    version=4,
    tables=(
        """CREATE TABLE records (
            kind TEXT NOT NULL, id TEXT NOT NULL, content TEXT NOT NULL, PRIMARY KEY (kind, id))""",
        """CREATE TABLE operations (
            number INTEGER PRIMARY KEY, request_id TEXT NOT NULL UNIQUE,
            client TEXT NOT NULL, kind TEXT NOT NULL, scope TEXT NOT NULL, seq INTEGER,
            digest BLOB NOT NULL, model TEXT NOT NULL, cost INTEGER NOT NULL, body BLOB,
            status INTEGER NOT NULL, attempts INTEGER NOT NULL, position INTEGER, shape TEXT,
            media INTEGER, result BLOB, finished REAL)""",
        "CREATE UNIQUE INDEX by_seq ON operations (scope, seq)",
        "CREATE INDEX by_model ON operations (model, position)",
        "CREATE INDEX by_finish ON operations (finished) WHERE result IS NOT NULL",
    ),
    synchronous="FULL",
)


@dataclass(frozen=True)
class Finished:
    """What is written when an operation is answered; a `position` is that before its change."""

    number: int
    result: Result
    time: float
    position: int | None = None
    shape: BatchShape | None = None
    keep_body: bool = False


@dataclass(frozen=True)
class Stored:
    """A change of a model as the log has it."""

    request: OperationRequest
    position: int | None
    shape: BatchShape | None


def accept(rows: sqlite3.Connection, request: OperationRequest) -> Accepted:
    """Enter an operation, or find the one with its scope and seq; `Refused` if that is another."""
    identity = request.body if request.identity is None else request.identity
    digest = hashlib.sha256(b"%b\0%b" % (request.kind.encode(), identity)).digest()
    if request.seq is not None:
        found = rows.execute(
            "SELECT request_id, number, digest FROM operations WHERE scope = ? AND seq = ?",
            (request.scope, request.seq),
        ).fetchone()
        if found is not None:
            if found[2] != digest:
                raise bad(
                    f"seq_id {request.seq} was used for another request: number each request anew"
                )
            return Accepted(found[0], found[1], False)
    request_id = uuid.uuid4().hex
    values = (request_id, request.client, request.kind, request.scope, request.seq, digest)
    more = (request.model, request.cost, request.body, QUEUED)
    added = rows.execute(
        "INSERT INTO operations (request_id, client, kind, scope, seq, digest, model, cost, body, "
        "status, attempts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (*values, *more),
    )
    return Accepted(request_id, int(added.lastrowid or 0), True)


def count_attempts(rows: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Count an attempt of operations, in which what executed them was lost."""
    rows.executemany(
        "UPDATE operations SET attempts = attempts + 1 WHERE number = ? AND status = ?",
        [(number, QUEUED) for number in numbers],
    )


def finish(rows: sqlite3.Connection, finished: Iterable[Finished]) -> None:
    """Write the answers of operations, and drop the bodies that no repetition needs."""
    for one in finished:
        shape = None if one.shape is None else json.dumps(asdict(one.shape))
        status = FAILED if one.result.failed else DONE
        values = (status, one.position, shape, MEDIA.index(one.result.media), one.result.content)
        body = "body" if one.keep_body else "NULL"
        rows.execute(
            "UPDATE operations SET status = ?, position = ?, shape = ?, media = ?, result = ?, "
            f"finished = ?, body = {body} WHERE number = ?",
            (*values, one.time, one.number),
        )


@dataclass(frozen=True)
class LoggedAnswer:
    """An operation's client, and its answer: none if it has none yet, or if it was dropped."""

    client: str
    answer: Result | None
    dropped: bool = False


def result_of(rows: sqlite3.Connection, request_id: str) -> LoggedAnswer | None:
    """Look an operation's answer up; None for an unknown one."""
    found = rows.execute(
        "SELECT client, status, media, result FROM operations WHERE request_id = ?", (request_id,)
    ).fetchone()
    if found is None:
        return None
    client, status, media, content = found
    if status in (QUEUED, EXPIRED):
        return LoggedAnswer(client, None, status == EXPIRED)
    return LoggedAnswer(client, Result(bytes(content), MEDIA[media], status == FAILED))


def pieces(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Divide operations, so that the bodies of each part can be freed in one job."""
    some, size = list[Operation](), 0
    for one in operations:
        some.append(one)
        size += one.size
        if size >= PIECE:
            yield some
            some, size = [], 0
    if some:
        yield some


def expire(rows: sqlite3.Connection, before: float, most_bytes: int, most_of_client: int) -> int:
    """Drop answers from before a time, and the oldest above a size; return how many, 0 at the end.

    Those of a client that has more than `most_of_client` bytes of them go first.
    """
    if dropped := _drop_oldest(rows, "finished < ?", (before,), math.inf):
        return dropped
    sizes = rows.execute(
        "SELECT client, SUM(LENGTH(result)) FROM operations WHERE result IS NOT NULL "
        "GROUP BY client"
    ).fetchall()
    for client, size in sizes:
        if dropped := _drop_oldest(rows, "client = ?", (client,), size - most_of_client):
            return dropped
    return _drop_oldest(rows, "TRUE", (), sum(size for _, size in sizes) - most_bytes)


def _drop_oldest(
    rows: sqlite3.Connection, where: str, values: tuple[Any, ...], excess: float
) -> int:
    """Drop the oldest answers that have `excess` bytes together, or a piece; return how many."""
    oldest = (
        "SELECT number, LENGTH(result) FROM operations "
        f"WHERE result IS NOT NULL AND {where} ORDER BY finished"
    )
    numbers = _numbers_of(rows, oldest, [values], min(excess, PIECE))
    dropped = [(EXPIRED, number) for number in numbers]
    rows.executemany("UPDATE operations SET result = NULL, status = ? WHERE number = ?", dropped)
    return len(dropped)


def _numbers_of(
    rows: sqlite3.Connection, select: str, each: Iterable[tuple[Any, ...]], most: float = PIECE
) -> list[int]:
    """Return the operations that a select of numbers and sizes finds, until they reach `most`."""
    found: list[int] = []
    for values in each:
        for number, size in rows.execute(select, values):
            if most <= 0:
                return found
            found.append(number)
            most -= ROW_BYTES + (size or 0)
    return found


def queued(rows: sqlite3.Connection) -> list[Operation]:
    """Return the operations that are not answered, in order of arrival, without their bodies."""
    found = rows.execute(
        "SELECT number, request_id, client, kind, scope, seq, model, cost, LENGTH(body), attempts "
        "FROM operations WHERE status = ? ORDER BY number",
        (QUEUED,),
    )
    return [
        Operation(
            number,
            request_id,
            OperationRequest(client, kind, scope, seq, b"", model, cost),
            size or 0,
            attempts=attempts,
        )
        for number, request_id, client, kind, scope, seq, model, cost, size, attempts in found
    ]


def body_of(rows: sqlite3.Connection, number: int) -> bytes:
    """Return the body of an operation that is not answered."""
    select = "SELECT body FROM operations WHERE number = ?"
    return bytes(rows.execute(select, (number,)).fetchone()[0])


def changes_after(rows: sqlite3.Connection, model: str, position: int) -> list[Stored]:
    """Return the changes of a model since a position, which a repetition executes in this order."""
    where = "model = ? AND position >= ? AND status IN (?, ?)"
    found = rows.execute(
        "SELECT client, kind, scope, seq, body, model, cost, position, shape "
        f"FROM operations WHERE {where} ORDER BY position",
        (model, position, DONE, EXPIRED),
    )
    return [
        Stored(
            OperationRequest(client, kind, scope, seq, bytes(body or b""), model, cost),
            position,
            None if shape is None else BatchShape(**json.loads(shape)),
        )
        for client, kind, scope, seq, body, model, cost, position, shape in found
    ]


def next_seqs(rows: sqlite3.Connection) -> dict[str, int]:
    """Return the number after that of each model's last executed operation."""
    select = (
        "SELECT model, MAX(seq) FROM operations WHERE status != ? AND model != '' GROUP BY model"
    )
    return {model: 1 + (seq or 0) for model, seq in rows.execute(select, (QUEUED,))}


def put(rows: sqlite3.Connection, one: Record) -> None:
    """Enter a record, or how it is now; a model that was unloaded stays so."""
    if isinstance(one, Model) and not one.unloaded:
        found = rows.execute(f"{_RECORD} AND id = ?", ("Model", one.id)).fetchone()
        one = replace(one, unloaded=found is not None and json.loads(found[1])["unloaded"])
    values = (type(one).__name__, one.id, json.dumps(asdict(one)))
    update = "ON CONFLICT DO UPDATE SET content = excluded.content"
    rows.execute(f"INSERT INTO records VALUES (?, ?, ?) {update}", values)


def forget(rows: sqlite3.Connection, kind: type[Record], names: Sequence[str]) -> None:
    """Forget records."""
    each = [(kind.__name__, name) for name in names]
    rows.executemany("DELETE FROM records WHERE kind = ? AND id = ?", each)


def drop_bodies(rows: sqlite3.Connection, model: str, before: int) -> int:
    """Drop a piece of the bodies of changes before a position; return how many, 0 at the end."""
    select = (
        "SELECT number, LENGTH(body) FROM operations "
        "WHERE model = ? AND position < ? AND body IS NOT NULL"
    )
    dropped = [(number,) for number in _numbers_of(rows, select, [(model, before)])]
    rows.executemany("UPDATE operations SET body = NULL WHERE number = ?", dropped)
    return len(dropped)


def delete_samplers(rows: sqlite3.Connection, names: Sequence[str]) -> int:
    """Forget a piece of samplers' answered operations, at the end samplers, and return 0."""
    scopes = [(f"{name}:sample", QUEUED) for name in names]
    return _delete(rows, SamplerSource, names, "scope = ? AND status != ?", scopes)


def delete_models(rows: sqlite3.Connection, names: Sequence[str]) -> int:
    """Forget a piece of the operations of unloaded models, at the end models, and return 0."""
    return _delete(rows, Model, names, "model = ?", [(name,) for name in names])


def delete_sessions(rows: sqlite3.Connection, names: Sequence[str]) -> int:
    """Forget a piece of what created the models of sessions, at the end sessions, and return 0."""
    return _delete(rows, ClientSession, names, "scope = ?", [(f"{name}:train",) for name in names])


def _delete(
    rows: sqlite3.Connection, kind: type[Record], names: Sequence[str], where: str, each: list[Any]
) -> int:
    """Delete a piece of operations, and records without any; return how many operations."""
    select = "SELECT number, IFNULL(LENGTH(body), 0) + IFNULL(LENGTH(result), 0) FROM operations "
    numbers = [(one,) for one in _numbers_of(rows, f"{select} WHERE {where}", each)]
    rows.executemany("DELETE FROM operations WHERE number = ?", numbers)
    if not numbers:
        forget(rows, kind, names)
    return len(numbers)


@dataclass(frozen=True)
class LoggedRecords:
    """All records of a log."""

    sessions: Mapping[str, ClientSession]
    models: Mapping[str, Model]
    saved: Mapping[str, Saved]
    samplers: Mapping[str, SamplerSource]


def read_records(rows: sqlite3.Connection) -> LoggedRecords:
    """Read all records."""

    select = f"{_RECORD} ORDER BY rowid"

    def each(kind: type[T]) -> dict[str, T]:
        found = {name: json.loads(text) for name, text in rows.execute(select, (kind.__name__,))}
        for values in found.values():
            if "spec" in values:
                values["spec"] = ModelSpec(**values["spec"])
        return {name: kind(**values) for name, values in found.items()}

    return LoggedRecords(each(ClientSession), each(Model), each(Saved), each(SamplerSource))
