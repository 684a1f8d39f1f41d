"""A run directory of before the store: brought into it once, and nothing of it lost."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stored_runs import group_of, pair_of, trace_of

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import pair_from_json, pair_to_json
from composer_mesh.rollouts.traces import trace_to_json
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.store.migration import LATE
from composer_mesh.services.store.rows import ItemState
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore

LATE_TABLES = (
    "CREATE TABLE pairs (place INTEGER PRIMARY KEY, pair_id TEXT NOT NULL UNIQUE, "
    "version INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'waiting', step INTEGER, "
    "body BLOB NOT NULL)",
    "CREATE TABLE rewards (place INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, "
    "reward REAL NOT NULL, source TEXT NOT NULL, posted REAL NOT NULL, "
    "state TEXT NOT NULL DEFAULT 'waiting', step INTEGER)",
)
METRICS = [{"step": 1, "loss/total": 1 / 3}, {"step": 2, "loss/total": None}]


@pytest.fixture
def config(build_config: Any) -> Config:
    """Two groups a step."""
    return build_config(run={"name": "unit", "seed": 3, "steps": 6})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps are done, group 4 is finished, and the writer was stopped in its next line."""
    for folder in ("traces", "pairs"):
        (tmp_path / folder).mkdir()
    lines = [trace_to_json(trace) + b"\n" for group in (1, 0, 2, 3, 4) for trace in group_of(group)]
    torn = trace_to_json(trace_of(5))[:-9]
    (tmp_path / "traces" / "traces.jsonl").write_bytes(b"".join([*lines, torn]))
    pairs = b"".join(pair_to_json(pair_of(group)) + b"\n" for group in range(4))
    (tmp_path / "pairs" / "pairs.jsonl").write_bytes(pairs)
    metrics = "".join(json.dumps(line) + "\n" for line in METRICS)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "success": 0.25, "episodes": 8}\n')
    (tmp_path / "poisoned.jsonl").write_text('{"error": "x"}\n')
    with closing(sqlite3.connect(tmp_path / "late.sqlite", isolation_level=None)) as rows:
        rows.execute(f"PRAGMA application_id = {LATE.application_id}")
        rows.execute(f"PRAGMA user_version = {LATE.version}")
        for table in LATE_TABLES:
            rows.execute(table)
        add = "INSERT INTO pairs (pair_id, version, state, step, body) VALUES (?, 0, ?, ?, ?)"
        for group, state, step in ((0, "expired", 1), (2, "trained", 1), (3, "waiting", None)):
            pair = pair_of(group)
            rows.execute(add, (pair.pair_id, state, step, pair_to_json(pair)))
        reward = "INSERT INTO rewards (trace_id, reward, source, posted) VALUES (?, 0.5, 'me', 7)"
        rows.execute(reward, (trace_of(3).trace_id,))
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.jsonl*") if path.is_file()}


def test_an_older_run_is_in_the_store_once_it_was_opened(run: Path, config: Config) -> None:
    with RunStore(run, config) as store:
        reading = store.reading
        groups = [(row.group_id, row.state, row.trained) for row in reading.groups()]
        trained = [(n, "trained", n // 2 + 1) for n in range(4)]
        assert groups == [*trained, (4, "finished", None)]
        assert [reading.traces(n) for n in range(5)] == [group_of(n) for n in range(5)]
        assert [(one.manifest, one.metrics) for one in reading.steps()] == [
            (b"", m) for m in METRICS
        ]
        pairs = {row.pair_id: (row.state, row.step, row.group_id) for row in reading.pairs()}
        assert pairs == {
            pair_of(0).pair_id: (ItemState.EXPIRED, 1, 0),
            pair_of(1).pair_id: (ItemState.TRAINED, 0, 1),
            pair_of(2).pair_id: (ItemState.TRAINED, 1, 2),
            pair_of(3).pair_id: (ItemState.WAITING, None, 3),
        }
        assert pair_from_json(next(reading.pairs()).body) == pair_of(0)
        (reward,) = reading.rewards()
        assert (reward.trace_id, reward.reward, reward.source) == (trace_of(3).trace_id, 0.5, "me")
        assert reading.evaluations() == [Evaluation(0, 0.25, 8)]
        assert reading.poisoned() == [{"error": "x"}]
    assert verify_run(run) == []


def test_the_old_files_are_kept_and_the_copies_stay_as_they_were(run: Path, config: Config) -> None:
    before = files(run)
    with RunStore(run, config):
        pass
    moved = sorted(path.name for path in (run / "migrated").iterdir())
    assert moved == ["late.sqlite", "pairs.jsonl", "traces.jsonl"]
    after = files(run)
    (event,) = map(json.loads, after.pop("events.jsonl").splitlines())
    assert event["event"] == "run_migrated"
    assert after == before


def test_a_migration_that_was_stopped_is_done_again(run: Path, config: Config) -> None:
    late = (run / "late.sqlite").read_bytes()
    (run / "late.sqlite").write_bytes(b"not yet readable")
    with pytest.raises(Exception, match=r"late\.sqlite cannot be migrated"):
        RunStore(run, config)
    (run / "late.sqlite").write_bytes(late)
    with RunStore(run, config) as store:
        assert len(store.reading.groups()) == 5
    assert not (run / "traces" / "traces.jsonl").exists()


def test_files_that_a_stop_left_behind_a_migration_are_not_read_twice(
    run: Path, config: Config
) -> None:
    line = trace_to_json(trace_of(4)) + b"\n"
    with RunStore(run, config):
        pass
    (run / "traces" / "traces.jsonl").write_bytes(line)
    asyncio.run(_trained_on(run, config))
    with RunStore(run, config) as store:
        assert [row.state for row in store.reading.groups()][4] == "trained"
    assert not (run / "traces" / "traces.jsonl").exists()


async def _trained_on(run: Path, config: Config) -> None:
    with RunStore(run, config) as store:
        await store.plan_step(2, [4], b"recipe")
