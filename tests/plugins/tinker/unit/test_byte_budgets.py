"""One client cannot fill the memory or the disk of a server, and limits free up again.

What a client leaves is freed in pieces, between which the log serves the other clients.
"""

import math
import sqlite3
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from served_world import served, training_body

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.records import Operation, OperationRequest, SamplerSource
from composer_mesh.plugins.tinker.server.requests import LARGEST_HELD, MOST_HELD, Payloads
from composer_mesh.plugins.tinker.server.results import RecentAnswers, Result
from composer_mesh.plugins.tinker.server.training_data import DataLimits


async def test_data_that_waits_is_bounded_for_a_client_and_for_all_and_frees_up(
    tmp_path: Path,
) -> None:
    size = len(training_body("x" * 45, 3, rows=8, length=32))
    limits = ServeConfig(
        max_open_mb_per_client=2.5 * size / 1e6, max_open_mb=3.5 * size / 1e6, gap_s=1000
    )
    async with served(tmp_path, limits) as world:
        greedy, modest = world.client("tml-one"), world.client("tml-two")
        first, other = await greedy.model(), await modest.model()
        for seq in (2, 3):  # behind a gap
            await greedy.send(training_body(first, seq, seq, rows=8, length=32))
        refusal = await greedy.send(training_body(first, 4, 4, rows=8, length=32), 429)
        assert "your open operations have" in refusal["detail"]
        assert "wait for some, and send this again" in refusal["detail"]
        waiting = await modest.send(training_body(other, 2, 2, rows=8, length=32))
        refusal = await modest.send(training_body(other, 3, 3, rows=8, length=32), 429)
        assert "all open operations have" in refusal["detail"]
        await greedy.raw(await greedy.train(first, 1))
        await modest.raw(await modest.train(other, 1))
        await modest.raw(waiting)
        answered = await greedy.send(training_body(first, 4, 4, rows=8, length=32))
        await greedy.raw(answered)
        metrics = world.tasks.server.metrics()
        assert (metrics["open_operations"], metrics["open_bytes"]) == (0, 0)


async def test_an_operation_that_no_budget_holds_is_refused_for_good(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(max_open_mb=0.0001)) as world:
        client = world.client()
        model = await client.model()
        refusal = await client.send(training_body(model, 1, rows=8, length=32), 413)
        assert "send it in parts" in refusal["detail"]


def test_only_small_bodies_are_held_in_memory_up_to_a_sum() -> None:
    payloads = Payloads(None, DataLimits(1, 1, 1, 1))  # type: ignore[arg-type]
    request = OperationRequest("a", "sample", "", None, b"")
    large = Operation(1, "", request, LARGEST_HELD + 1)
    payloads.hold(large, "payload")
    assert (large.payload, payloads.held) == (None, 0)
    many = [Operation(n, "", request, LARGEST_HELD) for n in range(MOST_HELD // LARGEST_HELD + 5)]
    for one in many:
        payloads.hold(one, "payload")
    assert payloads.held == MOST_HELD
    assert [one.payload for one in many[-6:]] == ["payload"] + [None] * 5
    for one in many:
        payloads.release(one)
    assert payloads.held == 0


async def test_operations_that_wait_are_read_from_the_log_when_they_are_executed(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, ServeConfig(gap_s=1000)) as world:
        client = world.client()
        session = await client.model()
        asked = [await client.train(session, seq, seed=seq) for seq in range(2, 12)]
    async with served(tmp_path, ServeConfig(gap_s=1000)) as world, served(tmp_path / "b") as other:
        assert not any(one.request.body or one.payload for one in await queued(world))
        await world.client().train(session, 1, seed=1)
        for one in asked:
            assert b"error" not in (await world.client().raw(one)).content
        client = other.client()
        model = await client.model()
        for seq in range(1, 12):
            await client.raw(await client.train(model, seq, seed=seq))
        assert world.trainer.models[session] == other.trainer.models[model]


async def queued(world: Any) -> list[Operation]:
    found: list[Operation] = await world.commits.run(log.queued)
    return found


async def test_an_operation_of_the_log_that_new_limits_refuse_fails_alone(tmp_path: Path) -> None:
    async with served(tmp_path, runs=False) as world:
        client = world.client()
        model = await client.model()
        asked = [await client.train(model, 1, rows=8), await client.train(model, 2)]
        wide = {"data": [5] * 10, "shape": [2, 5]}
        prompt = {"chunks": [{"tokens": [3, 4, 5]}]}
        settings = {"sampling_params": {"max_tokens": 2}, "base_model": "base"}
        drawn = await client.post("asample", **settings, prompt=prompt, target_prompt_logprobs=wide)
    job = "UPDATE operations SET body = X'00' WHERE request_id = ?"
    async with served(tmp_path, runs=False) as world:
        for one in (asked[0], drawn):
            await world.commits.run(partial(execute, job=job, name=one["request_id"]))
    async with served(tmp_path) as world:
        client = world.client()
        assert "is not a ForwardBackwardRequest" in (await client.result(asked[0]))["error"]
        assert "the body is" in (await client.result(drawn))["error"]
        assert b"error" not in (await client.raw(asked[1])).content


def execute(rows: sqlite3.Connection, job: str, name: str) -> None:
    rows.execute(job, (name,))


async def test_data_kept_for_a_repetition_are_bounded_without_any_step(tmp_path: Path) -> None:
    size = len(training_body("x" * 45, 3, rows=8, length=32))
    async with served(tmp_path, ServeConfig(max_repeated_mb=3.5 * size / 1e6)) as world:
        client = world.client()
        model = await client.model()
        for seq in range(1, 23):
            await client.raw(await client.send(training_body(model, seq, seq, rows=8, length=32)))
        kept = "SELECT SUM(LENGTH(body)) FROM operations WHERE result IS NOT NULL AND model != ''"
        (found,) = await world.commits.run(lambda rows: rows.execute(kept).fetchone())
        assert 0 < found <= 5 * size
        world.trainer.die()
        world.tasks.store.lost()
        await world.tasks.store.need([model])
        assert len(world.trainer.models[model]) == 22


async def test_a_client_with_many_answers_loses_its_own_and_no_other(tmp_path: Path) -> None:
    limits = ServeConfig(max_results_gb=1e-6, max_results_gb_per_client=5e-7)
    async with served(tmp_path, limits) as world:
        greedy, modest = world.client("tml-one"), world.client("tml-two")
        first, other = await greedy.model(), await modest.model()
        own = await modest.train(other, 1)
        asked = [await greedy.train(first, seq, seed=seq, length=16) for seq in range(1, 21)]
        for client, one in ((modest, own), *((greedy, one) for one in asked)):
            await client.raw(one)
        await world.tasks.housekeeping.drop_expired()
        sizes = dict(
            await world.commits.run(
                lambda rows: rows.execute(
                    "SELECT client, SUM(LENGTH(result)) FROM operations GROUP BY client"
                ).fetchall()
            )
        )
        assert max(sizes.values()) <= 500
        world.tasks.server._recent = RecentAnswers()
        assert (await modest.raw(own)).status_code == 200
        await greedy.raw(asked[0], 410)
        await greedy.raw(asked[-1])


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
