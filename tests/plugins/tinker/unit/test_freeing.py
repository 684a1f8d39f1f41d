"""What a client leaves is freed in pieces, between which the log serves the other clients."""

import math
import sqlite3
from collections.abc import Callable
from itertools import pairwise

import pytest

from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.records import Operation, OperationRequest, SamplerSource
from composer_mesh.plugins.tinker.server.results import Result

MODEL, MIB, COUNT = "a:train:1", 2**20, 12
HELD = "SELECT SUM(IFNULL(LENGTH(body), 0) + IFNULL(LENGTH(result), 0)) FROM operations"

FREEING: dict[str, Callable[[sqlite3.Connection], int]] = {
    "expire what is old": lambda rows: log.expire(rows, 10.0, 2**40, 2**40),
    "expire a client's": lambda rows: log.expire(rows, 0.0, 2**40, 0),
    "expire above the size of all": lambda rows: log.expire(rows, 0.0, 0, 2**40),
    "drop_bodies": lambda rows: log.drop_bodies(rows, MODEL, COUNT),
    "delete_models": lambda rows: log.delete_models(rows, [MODEL]),
    "delete_sessions": lambda rows: log.delete_sessions(rows, ["a"]),
    "delete_samplers": lambda rows: log.delete_samplers(rows, ["a"]),
}


def _filled() -> sqlite3.Connection:
    """Return a log with answered operations of a model, a session and a sampler, of a MiB each."""
    rows = sqlite3.connect(":memory:", isolation_level=None)
    for table in log.KIND.tables:
        rows.execute(table)
    for number in range(COUNT):
        scope = ("a:train", "a:sample", MODEL)[number % 3]
        request = OperationRequest("tml-a", "forward", scope, number, b"x" * MIB, MODEL)
        accepted = log.accept(rows, request)
        answer = Result(b"y" * MIB, "json")
        log.finish(rows, [log.Finished(accepted.number, answer, 5.0, number, None, True)])
    return rows


@pytest.mark.parametrize("name", FREEING)
def test_one_job_frees_no_more_than_a_piece_and_the_last_leaves_nothing(name: str) -> None:
    rows, free = _filled(), FREEING[name]
    held = [rows.execute(HELD).fetchone()[0]]
    while free(rows):
        held.append(rows.execute(HELD).fetchone()[0] or 0)
    freed = [before - after for before, after in pairwise(held)]
    assert max(freed) <= log.PIECE + 2 * MIB
    assert min(freed) > 0
    whole = {"delete_models": 2 * COUNT, "delete_sessions": 2 * COUNT / 3}
    assert sum(freed) == MIB * whole.get(name, 2 * COUNT / 3 if "samplers" in name else COUNT)


def test_operations_that_fail_together_are_divided_by_the_bytes_of_their_bodies() -> None:
    request = OperationRequest("a", "forward", MODEL, 1, b"", MODEL)
    sizes = [log.PIECE // 2, log.PIECE // 2, 3 * log.PIECE, 0, 0]
    operations = [Operation(n, "", request, size) for n, size in enumerate(sizes)]
    assert [[one.number for one in some] for some in log.pieces(operations)] == [
        [0, 1],
        [2],
        [3, 4],
    ]


def test_a_model_s_records_are_deleted_with_the_last_of_its_operations() -> None:
    rows = _filled()
    log.put(rows, SamplerSource("a", "a", "tml-a", "", "", ""))
    jobs = 1
    while log.delete_samplers(rows, ["a"]):
        jobs += 1
        assert rows.execute("SELECT COUNT(*) FROM records").fetchone() == (1,)
    assert jobs == 1 + math.ceil(COUNT / 3 * 2 * MIB / log.PIECE)
    assert rows.execute("SELECT COUNT(*) FROM records").fetchone() == (0,)
