"""The writer of a run: kept before it is used, kept once, and told again as it was."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from stored_runs import group_of, pair_of, short_run, trace_of

from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import pair_from_json
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.directory.report import Evaluation, read_evaluations, read_metrics
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import divergences_row, half_precision
from composer_mesh.services.store.rows import (
    DamagedRecord,
    GroupState,
    ItemState,
    StepState,
    StoreMissing,
    Where,
)
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config()


@pytest_asyncio.fixture
async def store(tmp_path: Path, config: Config) -> AsyncIterator[RunStore]:
    with RunStore(tmp_path, config) as store:
        yield store


async def planned(store: RunStore, step: int, **taken: Any) -> None:
    """A group of a step, taken by it."""
    await store.add_group(step, group_of(step))
    await store.plan_step(step, [step], b"recipe", **taken)


async def test_a_group_is_there_for_other_processes_when_the_call_returns(
    tmp_path: Path, store: RunStore
) -> None:
    store.enter(7, 3)
    group = group_of(7)
    assert await store.add_group(7, group) == group
    with RunReader(tmp_path) as reader:
        assert reader.traces(7) == group
        (row,) = reader.groups()
        assert (row.state, row.entered, row.traces) == (GroupState.FINISHED, 3, 2)
        assert row.bytes == path_of(tmp_path, 7).stat().st_size
        assert [one.trace_id for one in reader.rows()] == [one.trace_id for one in group]


async def test_a_group_that_is_there_wins_over_its_repetition(store: RunStore) -> None:
    first = group_of(0, size=2)
    await store.add_group(0, first)
    assert await store.add_group(0, group_of(0, size=3)) == first
    assert store.reading.traces(0) == first


async def test_a_group_without_rollouts_is_finished_and_has_no_file(
    tmp_path: Path, store: RunStore
) -> None:
    assert await store.add_group(4, []) == []
    assert await store.add_group(4, group_of(4)) == []
    assert [row.state for row in store.reading.groups()] == [GroupState.FINISHED]
    assert not path_of(tmp_path, 4).exists()


async def test_entering_again_changes_nothing_about_a_finished_group(store: RunStore) -> None:
    store.enter(0, 1)
    await store.add_group(0, group_of(0))
    store.enter(0, 2)
    await store.add_group(1, [])
    row = store.reading.group(0)
    assert row is not None
    assert (row.state, row.entered) == (GroupState.FINISHED, 1)


async def test_a_step_takes_groups_pairs_and_rewards_together(store: RunStore) -> None:
    await store.add_teacher_queries(0, b"figures", [pair_of(0), pair_of(0, "b")])
    await planned(store, 0, pairs=[pair_of(0).pair_id])
    (group,) = store.reading.groups()
    assert (group.state, group.trained) == (GroupState.TRAINED, 1)
    states = [(pair.state, pair.step) for pair in store.reading.pairs()]
    assert states == [(ItemState.TRAINED, 0), (ItemState.WAITING, None)]
    (step,) = store.reading.steps()
    assert (step.manifest, step.metrics, step.state) == (b"recipe", None, StepState.PLANNED)


@pytest.mark.parametrize(
    ("groups", "pairs"), [([0, 1], []), ([0, 0], []), ([0], ["nobody"]), ([0], ["taken"])]
)
async def test_a_step_that_cannot_take_all_takes_nothing(
    store: RunStore, groups: list[int], pairs: list[str]
) -> None:
    await store.add_teacher_queries(9, b"", [pair_of(9)])
    await planned(store, 0, pairs=[pair_of(9).pair_id])
    await store.add_group(5, group_of(5))
    wrong = [5 if group == 0 else group for group in groups]
    with pytest.raises(ValueError, match="cannot train it"):
        await store.plan_step(1, wrong, b"", [*pairs[:0], *map(_taken, pairs)])
    assert [row.step for row in store.reading.steps()] == [0]
    assert [row.group_id for row in store.reading.groups(GroupState.FINISHED)] == [5]


def _taken(name: str) -> str:
    return pair_of(9).pair_id if name == "taken" else name


async def test_a_group_is_never_trained_twice(store: RunStore) -> None:
    await planned(store, 0)
    with pytest.raises(ValueError, match="group 0 is not finished"):
        await store.plan_step(1, [0], b"")


async def test_pairs_are_offered_from_the_oldest_until_they_are_too_old(store: RunStore) -> None:
    pairs = [pair_of(n, version=n) for n in range(5)]
    for n, pair in enumerate(pairs):
        assert await store.add_teacher_queries(n, b"", [pair]) == [pair]
        assert await store.add_teacher_queries(n, b"", [pair]) == []
    assert await store.take_pairs(4, max_age=3, limit=2) == (pairs[1:3], 1)
    await planned(store, 4, pairs=[pairs[1].pair_id], max_age=3)
    assert await store.take_pairs(4, max_age=3, limit=9) == (pairs[2:], 0)
    states = [pair.state for pair in store.reading.pairs()]
    assert states[:3] == [ItemState.EXPIRED, ItemState.TRAINED, ItemState.WAITING]
    found = store.reading.pairs(ids=[pairs[3].pair_id, "none", pairs[1].pair_id])
    assert [pair_from_json(one.body) for one in found] == [pairs[3], pairs[1]]
    assert store.reading.waiting_pairs() == 3


async def test_the_metrics_of_a_step_are_a_row_and_a_line_and_stay(
    tmp_path: Path, store: RunStore
) -> None:
    await planned(store, 0)
    for loss in (None, 1.0):
        await store.end_step(0, {"step": 1, "loss/sdpo": loss})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss/sdpo": None}]
    (step,) = store.reading.steps()
    assert (step.metrics, step.state) == ({"step": 1, "loss/sdpo": None}, StepState.DONE)
    with pytest.raises(ValueError, match="step 1 was not planned"):
        await store.end_step(1, {"step": 2})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_metric_that_is_no_number_is_refused_and_leaves_nothing(
    tmp_path: Path, store: RunStore, value: float
) -> None:
    await planned(store, 0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        await store.end_step(0, {"step": 1, "loss/total": value})
    assert next(store.reading.steps()).metrics is None
    assert not (tmp_path / "metrics.jsonl").exists()


async def test_a_superseded_step_gives_back_what_it_took(tmp_path: Path, config: Config) -> None:
    await short_run(tmp_path, config, steps=3)
    with RunStore(tmp_path, config) as store:
        for step in (0, 1, 3):
            store.add_evaluation(Evaluation(step, 0.5, 8))
        await store.supersede(1)
        reading = store.reading
        states = [row.state for row in reading.groups()]
        assert states == ["trained", "finished", "finished", "finished", "in_flight"]
        assert [step.step for step in reading.steps()] == [0]
        assert [step.step for step in reading.steps(superseded=True)] == [0, 1, 2]
        assert [pair.state for pair in reading.pairs()][:2] == ["trained", "waiting"]
        assert [one["step"] for one in read_metrics(tmp_path / "metrics.jsonl")] == [1]
        kept = [0, 0, 1]
        assert [one.step for one in read_evaluations(tmp_path / "evaluations.jsonl")] == kept
        await store.plan_step(1, [1], b"again", [pair_of(1).pair_id])
        assert [step.manifest for step in reading.steps(since=1)] == [b"again"]


async def test_a_damaged_group_that_waits_is_sampled_again_and_one_that_was_trained_is_not(
    tmp_path: Path, store: RunStore
) -> None:
    await planned(store, 0)
    await store.add_group(1, group_of(1))
    await store.add_worded(1, b"words")
    await store.add_teacher_queries(1, b"asked", [pair_of(1)])
    for group in (0, 1):
        await store.quarantine(group, "a test")
    assert [row.state for row in store.reading.groups()] == ["damaged", "in_flight"]
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert names == ["000000.safetensors", "000001.safetensors"]
    assert store.reading.hint_writer_output(1) is None
    assert list(store.reading.teacher_queries()) == []
    assert await store.add_group(1, group_of(1, size=3)) == group_of(1, size=3)
    assert await store.add_teacher_queries(1, b"again", [pair_of(1)]) == [pair_of(1)]
    await store.supersede(0)
    assert [row.state for row in store.reading.groups()] == ["in_flight", "finished"]


async def test_rollouts_are_found_by_what_they_are(store: RunStore) -> None:
    await planned(store, 0)
    await store.add_group(1, [trace_of(1, 0, version=4, reward=0.25)])
    rows = store.reading.rows
    by_reward = [one.reward for one in rows(sort="reward", descending=True)]
    assert by_reward == [1.0, 0.25, 0.0]
    found = {
        "step": rows(Where(step=0)),
        "reward": rows(Where(min_reward=0.2, max_reward=0.3)),
        "error": rows(Where(error="unknown_tool"), limit=1),
        "none": rows(Where(error="unknown")),
        "failed": rows(Where(success=False)),
    }
    counts = {name: [one.group_id for one in some] for name, some in found.items()}
    assert counts == {"step": [0, 0], "reward": [1], "error": [0], "none": [], "failed": []}
    (row,) = rows(Where(trace_id="train-000001-000"))
    assert (row.turns, row.tokens, row.length, row.error_sites) == (2, 6, 12, 1)
    assert (row.oldest_version, row.newest_version, row.index) == (4, 5, 1)
    with pytest.raises(ValueError, match="sort is 'place' but must be one of trace_id"):
        list(rows(sort="place"))


async def test_copies_are_made_again_from_the_rows(tmp_path: Path, config: Config) -> None:
    await short_run(tmp_path, config)
    names = ("metrics.jsonl", "evaluations.jsonl")
    before = [(tmp_path / name).read_bytes() for name in names]
    (tmp_path / "metrics.jsonl").write_bytes(before[0] + b'{"step": 3, "lo')
    (tmp_path / "evaluations.jsonl").unlink()
    with RunStore(tmp_path, config):
        assert [(tmp_path / name).read_bytes() for name in names] == before


async def test_events_come_in_their_order_and_say_when(tmp_path: Path, config: Config) -> None:
    with RunStore(tmp_path, config) as store:
        store.add_event("actor_died", "generator-0", "killed", {"rank": 1})
        store.add_event("run_stopped")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event.pop("time") > 0 for event in events] == [True, True]
    assert events == [
        {"event": "actor_died", "actor": "generator-0", "detail": "killed", "fields": {"rank": 1}},
        {"event": "run_stopped", "actor": "", "detail": ""},
    ]


async def test_an_error_that_nobody_waited_for_ends_the_next_call(
    tmp_path: Path, config: Config
) -> None:
    store = RunStore(tmp_path, config)
    (tmp_path / "events.jsonl").mkdir()
    store.add_event("run_started")
    await asyncio.gather(store.add_group(0, []), return_exceptions=True)
    with store, pytest.raises(StoreError, match=r"events\.jsonl cannot keep .*Is a directory"):
        await store.add_group(1, [])


async def test_what_was_queued_is_written_although_its_caller_is_cancelled(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config) as store:
        task = asyncio.create_task(store.add_group(0, group_of(0)))
        await asyncio.sleep(0)
        task.cancel()
    with RunReader(tmp_path) as reader:
        assert reader.traces(0) == group_of(0)


async def test_waits_are_told_once(store: RunStore) -> None:
    await store.add_group(0, group_of(0))
    first, second = store.waits(), store.waits()
    assert first["store/wait_p99_s"] >= first["store/wait_p50_s"] > 0
    assert (first["store/bytes"] > 500, first["store/queue"]) == (True, 1)
    assert set(second.values()) == {0}


def test_the_resolved_config_in_the_directory_is_the_runs_own(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config):
        assert load_config(tmp_path / "config.toml") == config


def test_a_directory_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match=r"has no run\.sqlite: name the directory of a run"):
        RunReader(tmp_path)


def test_errors_of_the_store_cross_a_mesh() -> None:
    import pickle

    for error in (DamagedRecord("a", "b", "c"), StoreError("a", "b", "c", "d")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


VALUES = st.lists(st.floats(-9, 9, width=16), max_size=5).map(lambda values: array("f", values))
ONE = TurnDivergences("t", 0, array("f", [0.5, 0.25]))


@given(VALUES)
def test_values_come_back_as_they_were(values: array[float]) -> None:
    assert divergences_row((1, 0, "t", 2, half_precision(values))) == TurnDivergences(
        "t", 2, values
    )


def test_numbers_outside_of_half_precision_are_its_largest() -> None:
    row = (1, 0, "t", 0, half_precision([1e9, -1e9, float("inf"), -float("inf")]))
    assert list(divergences_row(row).values) == [65504, -65504, 65504, -65504]


@pytest.mark.parametrize("body", [b"x", "text", 5, None])
def test_a_body_that_holds_no_numbers_is_damaged(body: object) -> None:
    with pytest.raises(DamagedRecord, match="table divergences, row 1 is damaged"):
        divergences_row((1, 0, "t", 0, body))


async def test_a_run_stores_them_with_its_steps(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    root = tmp_path / "run"
    with RunStore(root, build_config()) as store:
        store.add_divergences(0, [ONE])
        store.add_divergences(0, [ONE, ONE])
        store.add_divergences(1, [ONE])
        await store.supersede(1)
        found = [store.reading.divergences(step) for step in range(2)]
    assert found == [[ONE, ONE], []]
    assert verify_run(root) == []
    with sqlite3.connect(root / "run.sqlite") as rows:
        rows.create_function("seal_of", -1, lambda *_: 0)
        rows.execute("UPDATE divergences SET body = x'0000'")
    rows.close()
    assert {one.kind for one in verify_run(root)} == {"damaged"}
